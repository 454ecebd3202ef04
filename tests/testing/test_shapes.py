"""The laws on drawn shapes and dtypes: rank 0 to 5, axes of size 0 included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reparax as rpx
from reparax.testing import check_laws

pytestmark = pytest.mark.thorough

REAL = ("float64", "float32", "bfloat16", "float16")
ANY = (*REAL, "complex64")

# Each stage with the ranks and dtypes that its formula takes, and the least size of an axis.
STAGES = {
    "weight norm": (rpx.WeightNorm(axis=-1, where="w"), 1, ANY, 0),
    "weight norm of the whole": (rpx.WeightNorm(axis=None, where="w"), 0, ANY, 0),
    "spectral norm": (rpx.SpectralNorm(columns=-1, where="w"), 2, ANY, 0),
    "low rank": (rpx.LowRank(1, rows=0), 2, ANY, 1),
    "low rank, stacked": (rpx.LowRank(1, stacked=0, columns=-1), 3, ANY, 1),
    "orthogonal": (rpx.Orthogonal(rows=-1), 2, ANY, 0),
    "orthogonal, stacked": (rpx.Orthogonal(stacked=1, columns=0), 3, ANY, 0),
    "noise": (rpx.VarNoise(0.1), 0, ANY, 0),
    "dropout": (rpx.WeightDropout(0.3, where="w"), 0, ANY, 0),
    "dropout of rows": (rpx.WeightDropout(0.3, broadcast_dims=-1, where="w"), 1, ANY, 0),
    "positive": (rpx.Positive(), 0, REAL, 0),
    "poincare": (rpx.norms.PoincareBall(along=-1, where="w"), 1, REAL, 0),
    "standardization": (rpx.norms.WeightStandardization(axis=(), where="w"), 1, ANY, 2),
    "simplex": (rpx.numbers.Simplex(along=-1), 1, REAL, 0),
    "pruning of slices": (rpx.MagnitudePruning(0.5, axis=-1, where="w"), 1, ANY, 0),
    "freeze": (rpx.Freeze(), 0, ANY, 0),
    "cast": (rpx.quantized.Cast("float32"), 0, REAL, 0),
    "chain": (rpx.WeightNorm(axis=-1, where="w") >> rpx.VarNoise(0.1) >> rpx.WeightDropout(0.1, where="w"), 1, ANY, 0),
}


def drawn(shape: tuple[int, ...], dtype: str) -> jax.Array:
    rng = np.random.default_rng(len(shape))
    numbers = rng.uniform(0.5, 2, shape) + (1j * rng.uniform(0.5, 2, shape) if dtype == "complex64" else 0)
    return jnp.asarray(numbers).astype(dtype)


@pytest.mark.parametrize(("p", "least_rank", "dtypes", "least_size"), STAGES.values(), ids=STAGES.keys())
@given(data=st.data())
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_laws_hold_for_every_shape_and_dtype(p, least_rank, dtypes, least_size, data):
    shape = data.draw(st.lists(st.integers(least_size, 3), min_size=least_rank, max_size=5).map(tuple))
    dtype = data.draw(st.sampled_from(dtypes))
    with jax.enable_x64():
        check_laws(p, {"w": drawn(shape, dtype)}, laws=("right_inverse", "types", "plain_trees"))
