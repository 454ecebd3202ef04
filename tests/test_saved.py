"""The report of what is kept, against sizes that are counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from errors import raises

import reparax as rpx

P = rpx.VarNoise(0.1)
PARAMS = {"a": jnp.ones((16, 32)), "b": jnp.ones((32, 4))}
KEY = jax.random.key(0)
X = jnp.ones((8, 16))


def loss(params, key, x):
    w = P.apply(params, key)
    return jnp.sum((x @ w["a"]) @ w["b"])


def test_a_hand_written_loss_keeps_its_effective_weights_and_activations():
    report = rpx.saved(loss, PARAMS, KEY, X)
    # The second matmul needs the noisy b for the gradient of its input; each needs its input.
    assert report.bytes("weights") == 32 * 4 * 4
    assert report.bytes("activations") == (8 * 16 + 8 * 32) * 4
    assert report.bytes("parameters") == 0


def test_remat_keeps_raw_parameters_instead():
    report = rpx.saved(rpx.remat(loss), PARAMS, KEY, X)
    assert report.bytes("weights") == 0
    assert report.bytes("activations") == (8 * 16 + 8 * 32) * 4
    assert {each.origin for each in report.kept if each.kind == "parameters"} == {"params/b", "key"}
    assert report.bytes("parameters") == 32 * 4 * 4 + 8  # and a key of two words


def test_without_noise_the_parameters_themselves_are_kept():
    report = rpx.saved(lambda params, x: jnp.sum((x @ params["a"]) @ params["b"]), PARAMS, X)
    assert (report.bytes("weights"), report.bytes("parameters")) == (0, 32 * 4 * 4)
    assert "params/b" in str(report)


def test_the_report_is_a_table_with_sizes_types_and_lines_of_source():
    lines = str(rpx.saved(jax.jit(loss), PARAMS, KEY, X)).splitlines()
    assert lines[:3] == [
        "kept for the backward pass: 2.0 KiB",
        "  raw parameters and keys: 0 B",
        "  made from these alone: 512 B",
    ]
    assert lines[3].startswith("         512 B  float32[32, 4]       ")
    assert lines[4] == "  activations and data: 1.5 KiB"
    assert lines[5].startswith("       1.0 KiB  float32[8, 32]       ")
    assert "test_saved.py" in lines[5]
    assert lines[6] == "         512 B  float32[8, 16]       x"
    assert len(lines) == 7


def test_shapes_are_enough_and_nothing_is_computed():
    shapes = jax.eval_shape(lambda: (PARAMS, KEY, X))
    assert rpx.saved(loss, *shapes) == rpx.saved(loss, PARAMS, KEY, X)


def test_what_is_returned_beside_the_loss_needs_nothing():
    def with_aux(params, key, x):
        return loss(params, key, x), jnp.exp(x @ params["a"])

    assert rpx.saved(with_aux, PARAMS, KEY, X, has_aux=True).bytes("activations") == (8 * 16 + 8 * 32) * 4


def test_large_sizes_have_large_units():
    big = jax.ShapeDtypeStruct((1024, 1024, 1024), jnp.float32)
    assert "4.0 GiB" in str(rpx.saved(lambda w: jnp.sum(w * w), big))


def test_without_floating_parameters_there_is_no_gradient():
    with raises(
        TypeError,
        "saved(<lambda>) found no floating array among the arguments that are parameters, so there is no gradient to "
        "take. Pass the parameters first, or name them by argnums.",
    ):
        rpx.saved(lambda n, w: jnp.sum(n * w), jnp.arange(3), jnp.ones(3))


def test_a_value_is_no_function():
    with raises(TypeError, "saved takes a function, but got 'float32[]' of type ArrayImpl."):
        rpx.saved(loss(PARAMS, KEY, X), PARAMS)


@pytest.mark.parametrize("kind", ["weight", None])
def test_unknown_kinds_are_refused(kind):
    with raises(ValueError, f"Saved.bytes takes 'parameters', 'weights' or 'activations', but got {kind!r}."):
        rpx.saved(loss, PARAMS, KEY, X).bytes(kind)
