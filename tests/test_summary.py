"""The summary of what a parametrization makes of parameters, against tables that are written by hand."""

import io

import jax
import jax.numpy as jnp
import pytest
import treescope
from rich.console import Console

import reparax as rpx

PARAMS = {
    "embed": {"table": jnp.ones((1024, 16))},
    "hidden": {"kernel": jnp.ones((16, 4), jnp.bfloat16), "bias": jnp.zeros(4)},
    "output": {"kernel": jnp.ones((16, 1024))},
    "steps": jnp.zeros((), jnp.int32),
}
P = (
    rpx.Freeze(where="hidden/bias")
    >> rpx.WeightNorm(where="hidden/kernel")
    >> rpx.Tie({"output/kernel": ("embed/table", jnp.transpose)})
    >> rpx.VarNoise(0.1)
)


def test_the_table_has_a_line_for_each_raw_value():
    # 16 x 1024 numbers of 4 bytes are 64 KiB; g of a bfloat16 kernel is float32.
    assert str(rpx.summary(P, PARAMS)).splitlines() == [
        "Freeze(where='hidden/bias') >> WeightNorm(where='hidden/kernel') >> "
        "Tie({'output/kernel': ('embed/table', jnp.transpose)}) >> VarNoise(0.1)",
        "path           raw value         type                 free  fixed     bytes  stages",
        "embed/table                      float32[1024, 16]  16,384      0  64.0 KiB  VarNoise",
        "hidden/bias    @freeze/@fixed/w  float32[4]              0      4      16 B  Freeze >> VarNoise",
        "hidden/kernel  @weight_norm/g    float32[1, 4]           4      0      16 B  WeightNorm >> VarNoise",
        "               @weight_norm/v    bfloat16[16, 4]        64      0     128 B",
        "output/kernel  @tie                                      0      0       0 B  Tie >> VarNoise",
        "steps                            int32[]                 1      0       4 B",
        "total                                               16,453      4  64.2 KiB",
    ]


def test_sums_are_those_of_the_rows():
    total = rpx.summary(P, PARAMS).total
    assert (total.free, total.fixed, total.bytes) == (16384 + 4 + 64 + 1, 4, 65536 + 16 + 16 + 128 + 4)


def test_shapes_are_enough_and_keys_have_a_size():
    shapes = jax.eval_shape(lambda: PARAMS)
    assert rpx.summary(P, shapes) == rpx.summary(P, PARAMS)
    (row,) = rpx.summary(rpx.Chain(), {"rng": jax.random.key(0)}).rows
    assert (row.type, row.bytes, row.stages) == ("key<fry>[]", 8, ())


def test_what_is_no_array_has_no_row():
    report = rpx.summary(rpx.VarNoise(0.1, where="w"), {"w": jnp.ones(2), "b": jnp.ones(2), "f": jnp.tanh})
    assert [(row.path, row.stages) for row in report.rows] == [("b", ()), ("w", ("VarNoise",))]


def test_a_stage_of_no_library_class_is_seen_too():
    class Doubled(rpx.Parametrization):
        def init(self, params, key=None):
            return {**params, "w": params["w"] / 2}

        def apply(self, raw, key=None):
            return {**raw, "w": raw["w"] * 2}

    report = rpx.summary(Doubled() >> rpx.WeightNorm(where="v"), {"v": jnp.ones((2, 2)), "w": jnp.ones(2)})
    assert [(row.path, row.value, row.stages) for row in report.rows] == [
        ("v", "@weight_norm/g", ("WeightNorm",)),
        ("v", "@weight_norm/v", ("WeightNorm",)),
        ("w", "", ("Doubled",)),
    ]


def test_notebooks_show_the_same_table_in_html():
    report = rpx.summary(rpx.Freeze(), {"a<b": jnp.ones(3)})
    left, right = (f'style="text-align: {side}; white-space: nowrap; padding: 0 0.5em"' for side in ("left", "right"))
    assert report._repr_html_() == (
        '<div style="overflow-x: auto">'
        "<table><caption>Freeze()</caption><thead><tr>"
        f"<th {left}>path</th><th {left}>raw value</th><th {left}>type</th>"
        f"<th {right}>free</th><th {right}>fixed</th><th {right}>bytes</th><th {left}>stages</th>"
        "</tr></thead><tbody><tr>"
        f"<td {left}>a&lt;b</td><td {left}>@freeze/@fixed/w</td><td {left}>float32[3]</td>"
        f"<td {right}>0</td><td {right}>3</td><td {right}>12 B</td><td {left}>Freeze</td>"
        "</tr><tr>"
        f"<td {left}>total</td><td {left}></td><td {left}></td>"
        f"<td {right}>0</td><td {right}>3</td><td {right}>12 B</td><td {left}></td>"
        "</tr></tbody></table></div>"
    )


def shown_by_rich(report, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(report)
    return [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]


def test_rich_shows_the_same_table():
    lines = shown_by_rich(rpx.summary(P, PARAMS), width=200)
    assert lines == [
        "Freeze(where='hidden/bias') >> WeightNorm(where='hidden/kernel') >> "
        "Tie({'output/kernel': ('embed/table', jnp.transpose)}) >> VarNoise(0.1)",
        "path            raw value          type                  free   fixed      bytes   stages",
        "─" * 107,
        "embed/table                        float32[1024, 16]   16,384       0   64.0 KiB   VarNoise",
        "hidden/bias     @freeze/@fixed/w   float32[4]               0       4       16 B   Freeze >> VarNoise",
        "hidden/kernel   @weight_norm/g     float32[1, 4]            4       0       16 B   WeightNorm >> VarNoise",
        "@weight_norm/v     bfloat16[16, 4]         64       0      128 B",
        "output/kernel   @tie                                        0       0        0 B   Tie >> VarNoise",
        "steps                              int32[]                  1       0        4 B",
        "total                                                  16,453       4   64.2 KiB",
    ]


def test_rich_takes_brackets_for_what_they_are_and_folds_what_is_too_long():
    report = rpx.summary(rpx.Freeze(where="[a-z]+"), {"b": jnp.ones(3), "[b]": jnp.ones(3)})
    assert shown_by_rich(report, width=200)[0] == "Freeze(where='[a-z]+')"
    lines = shown_by_rich(report, width=40)
    assert any(line.startswith("[b]") for line in lines)
    assert max(map(len, lines)) <= 40


# treescope 0.1.10 reads every name of numpy, and numpy 2.5 warns of some: https://github.com/numpy/numpy/pull/30605.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:treescope")
def test_treescope_shows_raw_trees_stages_and_summaries_by_their_contents():
    p = rpx.SpectralNorm() >> rpx.VarNoise(0.1)
    params = {"w": jnp.eye(3)}
    for value, words in (
        (p.init(params), ("'@spectral_norm': {", "'@fixed': {", "'u': <jax.Array(")),
        (p, ("SpectralNorm(", "n_steps=1", "VarNoise(", "std=0.1")),
        (rpx.summary(p, params), ("chain='SpectralNorm() >> VarNoise(0.1)'", "type='float32[3, 3]'", "free=9")),
    ):
        text = treescope.render_to_text(value)
        assert "object at 0x" not in text
        assert [word for word in words if word not in text] == []
