"""Parameters that go back onto an image after each step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises

import reparax as rpx


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("p", "start"),
    [
        (rpx.Orthogonal(), np.linalg.qr(normal(5, 3))[0]),
        (rpx.norms.MaxNorm(1.0, axis=-1), np.float32(0.1) * normal(5, 3)),
        (rpx.LowRank(1), normal(5, 1) @ normal(1, 3, seed=1)),
        (
            rpx.norms.Sphere(along=-1) >> rpx.VarNoise(0.1),
            normal(5, 3) / np.linalg.norm(normal(5, 3), axis=-1, keepdims=True),
        ),
    ],
    ids=repr,
)
def test_each_step_ends_on_the_image_at_the_point_nearest_to_a_plain_step(p, start):
    stage = p[0] if isinstance(p, rpx.Chain) else p
    params = {"w": start, "b": np.ones(3, np.float32)}
    plain = optax.sgd(0.3)
    tx = optax.chain(plain, rpx.training.projected(p))
    state, target = jax.jit(tx.init)(params), normal(5, 3, seed=2)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda params: jnp.sum((params["w"] - target) ** 2) + jnp.sum(params["b"] ** 2))(params)
        updates, state = tx.update(grads, state, params)
        moved = optax.apply_updates(params, plain.update(grads, ((), ()))[0])
        params = optax.apply_updates(params, updates)
        nearest = moved | {"w": stage.project(moved["w"])}
        return params, state, nearest, stage.contains(params["w"], tolerance=1e-5)

    for _ in range(3):
        params, state, nearest, contained = step(params, state)
        assert contained
        np.testing.assert_allclose(params["w"], nearest["w"], atol=1e-5)
        np.testing.assert_allclose(params["b"], nearest["b"], rtol=1e-6)


def test_a_single_array_can_be_all_parameters():
    tx = rpx.training.projected(rpx.norms.MaxNorm(1.0, axis=-1))
    w, step = np.float32([[0.6], [0.0]]), np.float32([[0.6], [1.6]])  # to (1.2, 1.6), whose norm is 2
    updates, _ = tx.update(step, tx.init(w), w)
    np.testing.assert_allclose(w + updates, [[0.6], [0.8]], rtol=1e-6)


def test_parameters_of_half_precision_take_updates_of_single_precision():
    tx = rpx.training.projected(rpx.norms.MaxNorm(1.0, axis=-1))
    w, step = np.float16([[0.75], [0.0]]), np.float32([[0.75], [2.0]])  # to (1.5, 2), whose norm is 2.5
    updates, _ = tx.update(step, tx.init(w), w)
    assert updates.dtype == np.float32
    np.testing.assert_allclose(w + np.asarray(updates), [[0.6], [0.8]], atol=1e-3)


def test_it_asks_for_parameters_and_refuses_what_it_cannot_take_at_once():
    tx = rpx.training.projected(rpx.Orthogonal())
    with raises(
        ValueError,
        "Orthogonal().projected needs the parameters that it projects, but got params=None. Call "
        "`tx.update(grads, state, params)`.",
    ):
        tx.update({"w": jnp.ones((2, 2))}, ())
    with pytest.raises(ValueError, match="selects nothing"):
        tx.init({"b": jnp.ones(2)})
