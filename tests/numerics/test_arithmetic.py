"""Predicates on arrays, and arithmetic in float32 or wider."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reparax.numerics import arithmetic

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("value", "array", "numeric", "gradient"),
    [
        (np.zeros(2, "float32"), True, True, True),
        (jax.ShapeDtypeStruct((2,), jnp.bfloat16), True, True, True),
        (np.zeros(2, "complex64"), True, True, True),
        (np.zeros(2, "int8"), True, True, False),
        (KEY, True, False, False),
        (1.0, False, False, False),
        (SimpleNamespace(shape=(2,)), False, False, False),
        (SimpleNamespace(dtype=np.dtype("float32")), False, False, False),
    ],
    ids=["float", "abstract", "complex", "integer", "key", "number", "shape", "dtype"],
)
def test_kinds_of_values(value, array, numeric, gradient):
    kinds = arithmetic.is_array(value), arithmetic.is_numeric(value), arithmetic.has_gradient(value)
    assert kinds == (array, numeric, gradient)
    assert arithmetic.inexact_places([1.0, value]) == [1] * gradient


@pytest.mark.parametrize(
    ("dtype", "wider"), [("bfloat16", "float32"), *((same, same) for same in ("float32", "float64", "complex64"))]
)
def test_narrow_dtypes_are_widened(dtype, wider):
    assert arithmetic.widened(np.ones(2, dtype)).dtype == wider


def test_sums_are_taken_in_float32_or_float64():
    narrow = [jnp.bfloat16(256), jnp.bfloat16(1), jnp.float32(2)]
    np.testing.assert_array_equal(arithmetic.add_up(narrow), np.float32(259), strict=True)  # bfloat16 has no 259
    np.testing.assert_array_equal(arithmetic.add_up([]), np.float32(0), strict=True)
    with jax.enable_x64():
        wide = arithmetic.add_up([*narrow, jnp.float64(2.0**-40)])
        np.testing.assert_array_equal(wide, 259 + np.float64(2.0**-40), strict=True)


def test_a_scalar_has_the_dtype_of_the_array():
    assert arithmetic.scalar(0.5, jnp.ones(2, "bfloat16")).dtype == jnp.bfloat16


def test_the_inverse_of_softplus():
    y = jnp.array([0.01, 1.0, 50.0])
    np.testing.assert_allclose(jax.nn.softplus(arithmetic.softplus_inverse(y)), y, rtol=1e-5)
