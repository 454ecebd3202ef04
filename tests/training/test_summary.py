"""The summary of what a parametrization makes of parameters, against tables that are written by hand."""

import io
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import reparax as rpx


def ones(*shape, dtype=np.float32):
    return jnp.asarray(np.ones(shape, dtype), dtype)


PARAMS = {
    "embed": {"table": ones(1024, 16)},
    "hidden": {"kernel": ones(16, 4, dtype=jnp.bfloat16), "bias": ones(4)},
    "output": {"kernel": ones(16, 1024)},
    "steps": ones(dtype=np.int32),
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
        "path           raw value         type                 free  fixed     bytes  off  stages            "
        "      axes",
        "embed/table                      float32[1024, 16]  16,384      0  64.0 KiB    -  VarNoise",
        "hidden/bias    @freeze/@fixed/w  float32[4]              0      4      16 B    -  Freeze >> VarNoise",
        "hidden/kernel  @weight_norm/g    float32[1, 4]           4      0      16 B    -  WeightNorm >> VarNoise  "
        "axis=-1 ('kernel')",
        "               @weight_norm/v    bfloat16[16, 4]        64      0     128 B",
        "output/kernel  @tie                                      0      0       0 B    -  Tie >> VarNoise",
        "steps                            int32[]                 0      1       4 B    -",
        "total                                               16,452      5  64.2 KiB    -",
    ]


def test_shapes_are_enough_and_keys_have_a_size():
    shapes = jax.eval_shape(lambda: PARAMS)
    of_arrays, of_shapes = (rpx.summary(P, params).rows for params in (PARAMS, shapes))
    assert of_shapes == tuple(replace(row, off=None) for row in of_arrays)
    (row,) = rpx.summary(rpx.Chain(), {"rng": jax.random.key(0)}).rows
    assert (row.type, row.bytes, row.stages) == ("key<fry>[]", 8, ())


def test_what_is_no_array_has_no_row():
    report = rpx.summary(rpx.VarNoise(0.1, where="w"), {"w": jnp.ones(2), "b": jnp.ones(2), "f": jnp.tanh})
    assert [(row.path, row.stages) for row in report.rows] == [("b", ()), ("w", ("VarNoise",))]


def test_a_summary_shows_itself_at_a_prompt_and_equals_an_equal_one():
    report, again, other = (rpx.summary(P, PARAMS), rpx.summary(P, PARAMS), rpx.summary(rpx.VarNoise(0.1), PARAMS))
    assert repr(report) == str(report)
    assert (report == again, hash(report) == hash(again), report == other) == (True, True, False)


# Repeated blocks. -------------------------------------------------------------------------------------------------


def transformer():
    """Three equal blocks, a fourth of its own, and two layers on top."""
    block = {"mlp": [{"kernel": jnp.ones((4, 4))} for _ in range(2)], "bias": jnp.ones(4)}
    other = {**block, "bias": jnp.ones(8)}
    return {"layers": [block, block, other, block], "out_1": jnp.ones(2), "out_2": jnp.ones(2)}


NORMED = rpx.WeightNorm(where="layers/.*kernel")


def test_parameters_that_differ_in_a_number_share_a_line_with_their_sums():
    report = rpx.summary(NORMED, transformer())
    assert str(report).splitlines() == [
        "WeightNorm(where='layers/.*kernel')",
        "path                         raw value       type               free  fixed  bytes  off  stages      axes",
        "layers/0..1/bias                             2 x float32[4]        8      0   32 B    -",
        "layers/0..3/mlp/0..1/kernel  @weight_norm/g  8 x float32[1, 4]    32      0  128 B    -  WeightNorm "
        " axis=-1 ('kernel')",
        "                             @weight_norm/v  8 x float32[4, 4]   128      0  512 B",
        "layers/2/bias                                float32[8]            8      0   32 B    -",
        "layers/3/bias                                float32[4]            4      0   16 B    -",
        "out_1..2                                     2 x float32[2]        4      0   16 B    -",
        "total                                                            184      0  736 B    -",
    ]
    assert len(report.rows) == 4 + 2 * 8 + 2
    assert sum(row.bytes for row in report.rows) == report.total.bytes == 736


def test_numbers_are_sorted_as_numbers_and_places_without_arrays_counted():
    p = rpx.Tie({r"layer_([1-9]\d*)": "layer_0"})
    assert str(rpx.summary(p, {f"layer_{i}": jnp.ones(2) for i in range(12)})).splitlines()[1:] == [
        "path         raw value  type        free  fixed  bytes  off  stages",
        "layer_0                 float32[2]     2      0    8 B    -",
        "layer_1..11  @tie       11 x           0      0    0 B    -  Tie",
        "total                                  2      0    8 B    -",
    ]


def test_model_state_and_counters_do_not_train():
    class Normed(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.linear, self.norm = nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    total = rpx.summary(rpx.VarNoise(0.1), nnx.state(Normed())).total
    assert (total.free, total.fixed) == (2 * 3 + 3 + 2 * 3, 2 * 3 + 2)  # a key, and a count of the draws


class OfEquinox(eqx.Module):
    """A table, a layer, and a norm of two axes."""

    words: eqx.nn.Embedding
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm


class OfNnx(nnx.Module):
    """A table, heads, and layers under a scan."""

    def __init__(self, rngs):
        self.words, self.heads = nnx.Embed(11, 6, rngs=rngs), nnx.LinearGeneral(6, (2, 3), rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(6, 6, rngs=rngs))(rngs.split(3))


def of_equinox():
    key = jax.random.key(0)
    return OfEquinox(eqx.nn.Embedding(11, 6, key=key), eqx.nn.Linear(6, 4, key=key), eqx.nn.LayerNorm((3, 2)))


def plain():
    types = {"embed": {"embedding": (11, 6)}, "layers": {"bias": (3, 6)}, "table": (3, 2), "out": {"kernel": (6, 4)}}
    return jax.tree.map(jnp.zeros, types, is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize(
    ("make", "axes", "left_out"),
    [
        (
            of_equinox,
            {
                "linear/weight": ("columns=-2 (eqx.nn.Linear)", "axis=-2 (eqx.nn.Linear)"),
                "words/weight": ("columns=-1 (eqx.nn.Embedding)",),
            },
            [
                "LowRank leaves out norm/weight, norm/bias",
                "WeightNorm leaves out words/weight, norm/weight, norm/bias",
                "WeightDropout leaves out norm/weight, norm/bias",
            ],
        ),
        (
            lambda: OfNnx(nnx.Rngs(0)),
            {
                "heads/kernel": ("columns=(-2, -1) (nnx.LinearGeneral)", "axis=(-2, -1) (nnx.LinearGeneral)"),
                "layers/kernel": ("columns=-1, stacked=0 (nnx.Linear)", "axis=-1, stacked=0 (nnx.Linear)"),
                "words/embedding": ("columns=-1 (nnx.Embed)",),
            },
            [
                "LowRank leaves out heads/bias, layers/bias",
                "WeightNorm leaves out heads/bias, layers/bias, words/embedding",
                "WeightDropout leaves out heads/bias, layers/bias",
            ],
        ),
        (
            plain,
            {
                "out/kernel": ("rows=0, columns=1 (a matrix)", "axis=-1 ('kernel')"),
                "embed/embedding": ("rows=0, columns=1 (a matrix)",),
                "table": ("rows=0, columns=1 (a matrix)",),
            },
            [
                "LowRank leaves out layers/bias",
                "WeightNorm leaves out embed/embedding, layers/bias, table",
                "WeightDropout leaves out layers/bias",
            ],
        ),
    ],
    ids=["equinox", "nnx", "plain"],
)
def test_the_axes_of_stages_say_where_they_are_from_and_weights_left_out_are_listed(make, axes, left_out):
    types = eqx.filter_eval_shape(make)
    made = rpx.summary(rpx.LowRank(2) >> rpx.WeightNorm() >> rpx.WeightDropout(0.1), types)
    assert {row.path: row.axes for row in made.rows if row.axes} == axes
    _, titles, *lines = str(made).splitlines()
    assert lines[-3:] == left_out
    assert "".join(f"<p>{line}</p>" for line in left_out) in made._repr_html_()
    column = titles.index("axes")
    shown = {line.split()[0]: line[column:] for line in lines[:-3] if line[column:]}
    assert shown == {path: "; ".join(texts) for path, texts in axes.items()}


def test_axes_that_the_user_gave_and_stages_without_axes():
    given = rpx.WeightNorm(axis=0, where="out/.*") >> rpx.Orthogonal(columns=0, where="table")
    made = rpx.summary(given >> rpx.VarNoise(0.1), jax.eval_shape(plain))
    assert {row.path: row.axes for row in made.rows if row.axes} == {
        "out/kernel": ("axis=0 (given)",),
        "table": ("columns=0 (given)",),
    }
    assert made.left_out == ()
    of_factors = rpx.summary(rpx.WeightNorm() >> rpx.LowRank(2), eqx.filter_eval_shape(of_equinox).linear)
    in_and_rank = "axis=-1 (a factor of eqx.nn.Linear)"
    assert of_factors.rows[1].axes == (in_and_rank, "columns=-2 (eqx.nn.Linear)")
    assert "axes" not in str(rpx.summary(rpx.VarNoise(0.1), jax.eval_shape(plain)))


def test_stages_of_vectors_leave_no_weights_out():
    assert rpx.summary(rpx.WeightNorm(), jax.eval_shape(lambda: {"kernel": jnp.ones((2, 2))})).left_out == ()
    params = {"p": jnp.ones(3), "codes": jnp.ones((2, 2), jnp.int32)}
    assert rpx.summary(rpx.numbers.Simplex(), jax.eval_shape(lambda: params)).left_out == ()
    of_matrices = rpx.summary(rpx.WeightNorm(), jax.eval_shape(lambda: params | {"kernel": jnp.ones((2, 2))}))
    assert of_matrices.left_out == (("WeightNorm", ("codes",)),)


def test_notebooks_show_the_same_table_in_html():
    report = rpx.summary(rpx.Freeze(), {"a<b": jnp.ones(3)})
    left, right = (f'style="text-align: {side}; white-space: nowrap; padding: 0 0.5em"' for side in ("left", "right"))
    assert report._repr_html_() == (
        '<div style="overflow-x: auto">'
        "<table><caption>Freeze()</caption><thead><tr>"
        f"<th {left}>path</th><th {left}>raw value</th><th {left}>type</th>"
        f"<th {right}>free</th><th {right}>fixed</th><th {right}>bytes</th><th {right}>off</th><th {left}>stages</th>"
        "</tr></thead><tbody><tr>"
        f"<td {left}>a&lt;b</td><td {left}>@freeze/@fixed/w</td><td {left}>float32[3]</td>"
        f"<td {right}>0</td><td {right}>3</td><td {right}>12 B</td><td {right}>-</td><td {left}>Freeze</td>"
        "</tr><tr>"
        f"<td {left}>total</td><td {left}></td><td {left}></td>"
        f"<td {right}>0</td><td {right}>3</td><td {right}>12 B</td><td {right}>-</td><td {left}></td>"
        "</tr></tbody></table></div>"
    )


def shown_by_rich(report, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(report)
    return [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]


def test_weights_left_out_are_folded_and_escaped_and_shown_everywhere():
    codes = [{"codes": ones(2, 2, dtype=np.int32)} for _ in range(3)]
    report = rpx.summary(rpx.WeightNorm(), {"a<b": codes, "kernel": ones(2, 2)})
    note = "WeightNorm leaves out a<b/0..2/codes"
    assert str(report).splitlines()[-1] == shown_by_rich(report, width=200)[-1] == note
    assert report._repr_html_().endswith(f"</table><p>{note.replace('<', '&lt;')}</p></div>")
    with pytest.raises(ValueError, match="summary takes the model's own parameters, but got a raw tree"):
        rpx.summary(rpx.WeightNorm(), rpx.WeightNorm().init({"kernel": ones(2, 2)}))


def test_rich_shows_the_same_table():
    lines = shown_by_rich(rpx.summary(P, PARAMS), width=200)
    assert lines == [
        "Freeze(where='hidden/bias') >> WeightNorm(where='hidden/kernel') >> "
        "Tie({'output/kernel': ('embed/table', jnp.transpose)}) >> VarNoise(0.1)",
        "path            raw value          type                  free   fixed      bytes   off   "
        "stages                   axes",
        "─" * 134,
        "embed/table                        float32[1024, 16]   16,384       0   64.0 KiB     -   VarNoise",
        "hidden/bias     @freeze/@fixed/w   float32[4]               0       4       16 B     -   Freeze >> VarNoise",
        "hidden/kernel   @weight_norm/g     float32[1, 4]            4       0       16 B     -   "
        "WeightNorm >> VarNoise   axis=-1 ('kernel')",
        "@weight_norm/v     bfloat16[16, 4]         64       0      128 B",
        "output/kernel   @tie                                        0       0        0 B     -   Tie >> VarNoise",
        "steps                              int32[]                  0       1        4 B     -",
        "total                                                  16,452       5   64.2 KiB     -",
    ]
