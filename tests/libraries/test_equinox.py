"""equinox: modules that hold functions, filtered transformations, and partition."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import mlp
import numpy as np
import optax
from jax import Array

import reparax as rpx

X, Y = mlp.data()
P = rpx.WeightNorm(axis=0)  # a weight is (out, in) here


def model() -> eqx.nn.MLP:
    made = eqx.filter_eval_shape(eqx.nn.MLP, 3, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    return eqx.tree_at(values, made, [jnp.asarray(w.T, jnp.float32) for w in (mlp.W1, mlp.B1, mlp.W2, mlp.B2)])


def values(tree: Any) -> list[Any]:
    return [array for layer in tree.layers for array in (layer.weight, layer.bias)]


def transposed(tree: Any) -> list[Any]:
    """What stands in other libraries: kernels of shape (in, out)."""
    return [jax.tree.map(np.transpose, value) for value in values(tree)]


def loss_of(effective: Any) -> Array:
    return mlp.mean_square(jax.vmap(effective)(X), Y)


def test_filtered_transformations_train_raw_values_among_functions() -> None:
    raw, tx = eqx.filter_jit(P.init)(model()), optax.sgd(mlp.RATE)

    @eqx.filter_jit
    def step(raw: Any, state: Any) -> Any:
        value, slope = eqx.filter_value_and_grad(lambda raw: loss_of(P.apply(raw)))(raw)
        updates, state = tx.update(slope, state, eqx.filter(raw, eqx.is_inexact_array))
        return eqx.apply_updates(raw, updates), state, value, slope

    state, losses, slopes = tx.init(eqx.filter(raw, eqx.is_inexact_array)), [], []
    for _ in range(mlp.STEPS):
        raw, state, loss, slope = step(raw, state)
        losses.append(loss)
        slopes.append(slope)
    P.check(raw, like=model())
    effective = eqx.filter_jit(P.fold)(raw)
    assert effective.activation is jnp.tanh
    mlp.assert_gradients(*transposed(slopes[0]))
    mlp.assert_trained(losses, transposed(effective))


def test_free_values_are_parted_from_fixed_ones_and_from_functions() -> None:
    p = rpx.Freeze(where="layers/1/.*") >> P
    raw = eqx.filter_jit(p.init)(model())
    trains = jax.tree.map(
        lambda free, x: free and eqx.is_inexact_array(x),
        rpx.training.param_labels(raw, main=True, aux=True, fixed=False),
        raw,
    )
    free, rest = eqx.partition(raw, trains)
    slope = jax.jit(jax.grad(lambda free: loss_of(p.apply(eqx.combine(free, rest)))))(free)
    assert [x.shape for x in jax.tree.leaves(slope)] == [(4, 1), (4, 3), (4,)]
    np.testing.assert_allclose(slope.layers[0].bias, mlp.EXPECTED.gradients[2], rtol=1e-5, atol=1e-6)
