"""The report of what is kept, against sizes that are counted by hand."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table
from grids import mostly_thorough

import reparax as rpx
from reparax.transforms import saved_residuals

P = rpx.VarNoise(0.1)
PARAMS = {"a": np.ones((16, 32), np.float32), "b": np.ones((32, 4), np.float32)}
KEY = jax.random.key(0)
X = jnp.asarray(np.ones((8, 16), np.float32), np.float32)


def loss(params, key, x):
    w = P.apply(params, key)
    return jnp.sum((x @ w["a"]) @ w["b"])


def test_a_hand_written_loss_keeps_its_effective_weights_and_activations():
    report = saved_residuals(loss, PARAMS, KEY, X)
    # The second matmul needs the noisy b for the gradient of its input; each needs its input.
    assert report.bytes("weights") == 32 * 4 * 4
    assert report.bytes("activations") == (8 * 16 + 8 * 32) * 4
    assert report.bytes("parameters") == 0
    assert report.bytes() == (32 * 4 + 8 * 16 + 8 * 32) * 4


def test_keys_that_a_loss_closes_over_count_as_keys():
    report = saved_residuals(lambda params, x: loss(params, KEY, x), PARAMS, X)
    assert report.bytes("weights") == 32 * 4 * 4
    assert report.bytes("activations") == (8 * 16 + 8 * 32) * 4
    again = saved_residuals(rpx.remat(lambda params, x: loss(params, KEY, x)), PARAMS, X)
    assert (again.bytes("weights"), again.bytes("parameters")) == (0, 32 * 4 * 4 + 8)


def test_remat_keeps_raw_parameters_instead():
    report = saved_residuals(rpx.remat(loss), PARAMS, KEY, X)
    assert report.bytes("weights") == 0
    assert report.bytes("activations") == (8 * 16 + 8 * 32) * 4
    assert {each.origin for each in report.kept if each.kind == "parameters"} == {"params/b", "key"}
    assert report.bytes("parameters") == 32 * 4 * 4 + 8  # and a key of two words


def test_without_noise_the_parameters_themselves_are_kept():
    report = saved_residuals(lambda params, x: jnp.sum((x @ params["a"]) @ params["b"]), PARAMS, X)
    assert (report.bytes("weights"), report.bytes("parameters")) == (0, 32 * 4 * 4)
    assert "params/b" in str(report)


def line(text, function=loss):
    """Where the line that holds ``text`` stands, as far as the function's name, without the column."""
    lines, first = inspect.getsourcelines(function)
    (number,) = (first + i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{number}:"


def shown(report):
    """The report's lines, without columns of source, which are those of a version of Python."""
    return re.sub(r"(\.py:\d+:)\d+", r"\1", repr(report)).splitlines()


def test_the_report_is_a_table_with_sizes_types_and_lines_of_source():
    assert shown(saved_residuals(jax.jit(loss), PARAMS, KEY, X)) == [
        "kept for the backward pass: 2.0 KiB",
        "  raw parameters and keys: 0 B",
        "  made from these alone: 512 B",
        f"         512 B  float32[32, 4]       {line('P.apply')} (loss)",
        "  activations and data: 1.5 KiB",
        f"       1.0 KiB  float32[8, 32]       {line('x @ w')} (loss)",
        "         512 B  float32[8, 16]       x",
    ]


def test_equal_lines_are_counted_and_show_the_users_line_under_remat_too():
    def deep(params, key, x):
        for layer in params["layers"]:
            x = x @ P.apply(layer, key)["w"]
        return jnp.sum(jax.lax.scan(lambda h, _: (jnp.sin(h @ params["last"]), None), x, length=2)[0])

    eye = np.eye(16, dtype=np.float32)
    params = {"layers": [{"w": eye} for _ in range(3)], "last": eye}
    report, name = saved_residuals(rpx.remat(deep), params, KEY, X), deep.__qualname__
    assert shown(report) == [
        "kept for the backward pass: 6.5 KiB",
        "  raw parameters and keys: 3.0 KiB",
        "       2.0 KiB  2 x float32[16, 16]  params/layers/1..2/w",  # nobody asks for the gradient of x
        "       1.0 KiB  float32[16, 16]      params/last",
        "           8 B  key<fry>[]           key",
        "  made from these alone: 0 B",
        "  activations and data: 3.5 KiB",
        f"       2.0 KiB  2 x float32[2, 8, 16] {line('lax.scan', deep)} ({name})",  # h, and cos of h @ last
        f"       1.0 KiB  2 x float32[8, 16]    {line('P.apply', deep)} ({name})",
        "         512 B  float32[8, 16]        x",
    ]
    assert report == saved_residuals(rpx.remat(deep), params, KEY, X)
    assert str(report) == repr(report)


STAGES = [rpx.SpectralNorm(), rpx.Orthogonal(), rpx.LowRank(2), rpx.WeightNorm() >> rpx.WeightDropout(0.5)]


def looped(p):
    """A loss that makes weights inside of a loop and inside of ``jax.jit``."""

    def of_both(raw, key, x):
        def step(h, key):
            return jnp.tanh(h @ p.apply(raw, key)["w"]), None

        h, _ = jax.lax.scan(step, x, jax.random.split(key, 3))
        return jnp.sum(h @ jax.jit(p.apply)(raw, key)["w"])

    return of_both


AROUND = {"itself": lambda f: f, "remat": rpx.remat, "jit": jax.jit, "both": lambda f: rpx.remat(jax.jit(f))}


@pytest.mark.parametrize("p", mostly_thorough(STAGES, STAGES[0], STAGES[-1]), ids=repr)
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_no_line_of_this_library_or_of_jax_is_named(p, around):
    # Of a shape of its own: what JAX has traced for another test it does not trace again, and keeps that test's lines.
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((23, 23), (3, 23)))
    report = saved_residuals(around(looped(p)), jax.eval_shape(p.init, {"w": w}), KEY, x)
    made = [each.origin for each in report.kept if not each.origin.startswith(("raw/", "x", "key"))]
    assert made
    assert [origin for origin in made if not origin.startswith(__file__)] == []


def test_each_of_two_calls_has_its_own_line():
    def twice(params, key, x):
        first = P.apply({"w": params["w"]}, key)
        again = P.apply({"w": params["w"]}, key)
        return jnp.sum((x @ first["w"]) @ again["w"])

    report = saved_residuals(twice, {"w": np.eye(16, dtype=np.float32)}, KEY, X)
    origins = {each.origin.rsplit(":", 1)[0] for each in report.kept if each.kind == "weights"}
    assert origins == {line("again = ", twice)[:-1]}  # the gradient of the first weight needs the second alone


def test_shapes_are_enough_and_nothing_is_computed():
    shapes = jax.eval_shape(lambda: (PARAMS, KEY, X))
    assert saved_residuals(loss, *shapes) == saved_residuals(loss, PARAMS, KEY, X)


def test_what_is_returned_beside_the_loss_needs_nothing():
    def with_aux(params, key, x):
        return loss(params, key, x), jnp.exp(x @ params["a"])

    assert saved_residuals(with_aux, PARAMS, KEY, X, has_aux=True).bytes("activations") == (8 * 16 + 8 * 32) * 4


def test_large_sizes_have_large_units():
    big = jax.ShapeDtypeStruct((1024, 1024, 1024), jnp.float32)
    assert "4.0 GiB" in str(saved_residuals(lambda w: jnp.sum(w * w), big))


def test_a_line_of_a_notebook_is_that_of_a_cell():
    globs = {"jnp": jnp}
    exec(compile("def loss(w, x):\n    return jnp.sum(x @ jnp.sin(w))", "/tmp/ipykernel_12/3456.py", "exec"), globs)
    assert {each.origin for each in saved_residuals(globs["loss"], jnp.ones((4, 4)), jnp.ones((2, 4))).kept} >= {
        "<cell>:2:23 (loss)"
    }


def kept(params, *, argnums=1, has_aux=False):
    """A loss with options of the names that reports have."""
    return argnums * jnp.sum(params["a"])


def test_an_option_of_a_name_that_a_report_has_is_that_of_the_loss_if_it_is_bound():
    for report in (rpx.roles, rpx.explain, saved_residuals):
        bound = report(lambda params: kept(params, argnums=3), PARAMS, argnums=0)
        assert f"{bound}" == f"{report(lambda params: kept(params, argnums=3), PARAMS)}"


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
