"""The adapter to a total space: frames over rotations, as geotorch builds them, and any other stage or chain inside."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from compiled import effective, fold, init, read
from errors import table

import reparax as rpx


def first_columns(q):
    return q[:, :2]


def completed(w):
    """A rotation that has the columns of ``w`` as its first ones."""
    q, r = jnp.linalg.qr(w, mode="complete")
    signs = jnp.sign(jnp.diagonal(r))
    q = jnp.concatenate([q[:, :2] * signs[None], q[:, 2:]], axis=1)
    return q.at[:, -1].multiply(jnp.linalg.det(q))


STIEFEL = rpx.matrices.SpecialOrthogonal("expm") >> rpx.matrices.Fibration(first_columns, completed)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_frames_over_rotations_start_at_the_frame_and_are_the_columns_of_geotorch():
    w = scipy.linalg.polar(normal(4, 2))[0]
    raw = init(STIEFEL, {"w": w})
    np.testing.assert_allclose(read(STIEFEL, raw), w, rtol=0, atol=1e-6)
    node = raw["w"]["@fibration"]["x"]["@special_orthogonal"]
    base, x = np.asarray(node["@fixed"]["base"], np.float64), normal(4, 2, seed=1).astype(np.float64)
    # geotorch's raw value is n x k, below the diagonal, padded with zeros to n x n, and in the basis of the base.
    padded = np.pad(np.tril(x, -1), ((0, 0), (0, 2)))
    expected = (base @ scipy.linalg.expm(padded - padded.T))[:, :2]
    node["x"] = np.float32(base @ padded)
    np.testing.assert_allclose(read(STIEFEL, raw), expected, rtol=0, atol=1e-5)


def test_a_whole_chain_may_act_in_the_total_space():
    p = (
        rpx.VarNoise(0.1)
        >> rpx.WeightNorm(axis=None, where="w")
        >> rpx.matrices.Symmetric()
        >> rpx.matrices.Fibration(jnp.diagonal, jnp.diag)
    )
    w = np.float32([1, 2])
    raw = init(p, {"w": w})
    np.testing.assert_allclose(fold(p, raw)["w"], w, rtol=1e-6)
    assert not np.allclose(effective(p, raw, jax.random.key(0))["w"], w)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
