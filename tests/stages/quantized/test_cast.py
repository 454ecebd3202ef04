"""Weights in another dtype than the one that trains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from one_array import gradient, normal

import reparax as rpx


def test_cast_gives_the_rounded_weight():
    w = normal(6, 4)
    got = rpx.quantized.Cast("bfloat16").apply({"w": jnp.asarray(w)})["w"]
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), w.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize(("raw", "effective"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_gradient_of_a_cast_arrives_in_the_raw_dtype(raw, effective):
    p = rpx.quantized.Cast(effective)
    grad = jax.jit(lambda raw: gradient(p, raw))({"w": np.full((3, 2), 1.5, jnp.dtype(raw))})["w"]
    assert grad.dtype == raw
    np.testing.assert_array_equal(np.asarray(grad, np.float32), np.full((3, 2), 3.0))


def test_a_dtype_is_stored_by_its_name():
    assert rpx.quantized.Cast(jnp.bfloat16) == rpx.quantized.Cast("bfloat16")
    assert rpx.quantized.Cast(np.float16).dtype == "float16"


@pytest.mark.parametrize(
    ("dtype", "got"),
    [("foo", "'foo'"), (None, "None"), ("int32", "'int32'"), ("complex64", "'complex64'"), (bool, "'bool'")],
)
def test_what_is_no_floating_dtype_is_refused(dtype, got):
    with raises(TypeError, f"Cast takes a floating dtype or its name, such as 'bfloat16', but got {got}."):
        rpx.quantized.Cast(dtype)


def test_cast_leaves_complex_and_whole_numbers_alone():
    tree = {"w": jnp.ones(2), "z": jnp.ones(2, "complex64"), "n": jnp.ones(2, "int32")}
    got = rpx.quantized.Cast("bfloat16").apply(tree)
    assert {name: x.dtype.name for name, x in got.items()} == {"w": "bfloat16", "z": "complex64", "n": "int32"}
