"""kfac_jax, which reads the loss: a wrapped network trains by it as the road of functions does."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx

kfac_jax = pytest.importorskip("kfac_jax")
old = tuple(map(int, jax.__version__.split(".")[:3])) <= (0, 9, 0)
pytestmark = pytest.mark.skipif(not old, reason="kfac_jax 0.0.8 unpacks the parameters of equations as JAX 0.9.0 does")

P = rpx.WeightNorm(where=".*/w")
RNG = np.random.default_rng(0)
BATCH = (RNG.normal(size=(32, 4)).astype(np.float32), RNG.normal(size=(32, 2)).astype(np.float32))
PLAIN = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2)(x)))


def losses(params: Any, apply: Any) -> list[float]:
    """kfac_jax's loop, which knows of no chain."""

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        out = apply(params, x)
        kfac_jax.register_squared_error_loss(out, y)
        return jnp.mean(jnp.sum((out - y) ** 2, axis=-1))

    optimizer = kfac_jax.Optimizer(
        value_and_grad_func=jax.value_and_grad(loss),
        l2_reg=0.0,
        learning_rate_schedule=lambda _: 0.1,
        momentum_schedule=lambda _: 0.0,
        damping_schedule=lambda _: 1.0,
        num_burnin_steps=0,
    )
    params, key = jax.tree.map(jnp.array, params), jax.random.PRNGKey(0)  # a copy, as buffers are donated
    state, found = optimizer.init(params, key, BATCH), []
    for step in range(3):
        params, state, stats = optimizer.step(params, state, key, batch=BATCH, global_step_int=step)
        found.append(float(stats["loss"]))
    return found


def test_a_wrapped_network_trains_by_kfac_as_the_road_of_functions_does() -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        start = PLAIN.init(jax.random.key(0), BATCH[0])
        network = rpx.haiku.parametrized(PLAIN, P)
        got = losses(network.start(start), network.apply)
        want = losses(P.init(start), lambda raw, x: PLAIN.apply(P.apply(raw), x))
        plain = losses(start, PLAIN.apply)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(got[0], plain[0], rtol=1e-5)
    assert abs(got[2] - plain[2]) > 1e-4
    assert got[2] < got[0]
