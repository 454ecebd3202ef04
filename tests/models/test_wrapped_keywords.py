"""A model may call its own arguments as it likes: no name of ours is in their way."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from flax import linen as nn
from flax import nnx

import reparax as rpx

X = np.ones((1, 3), np.float32)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any, plain: int = 1, rngs: int = 1, method: int = 1) -> Any:
        return nn.Dense(2, name="dense")(x) * plain * rngs * method


class Nnx(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x: Any, module: int = 1, name: int = 1) -> Any:
        return self.dense(x) * module * name


class Equinox(eqx.Module):
    dense: eqx.nn.Linear

    def __call__(self, x: Any, name: int = 1) -> Any:
        return self.dense(x) * name


def test_of_linen() -> None:
    model = rpx.linen.parametrized(Linen(), rpx.WeightNorm())
    variables = model.init(jax.random.key(0), X, plain=2)
    np.testing.assert_allclose(model.apply(variables, X, plain=2), 2 * model.apply(variables, X), rtol=1e-6)


def test_of_nnx() -> None:
    model = rpx.nnx.Parametrized(Nnx(), rpx.WeightNorm())
    np.testing.assert_allclose(model(X, module=2, name=2), 4 * model(X), rtol=1e-6)


def test_of_equinox() -> None:
    model = rpx.equinox.Parametrized(Equinox(eqx.nn.Linear(3, 2, key=jax.random.key(0))), rpx.WeightNorm())
    np.testing.assert_allclose(model(X[0], name=2), 2 * model(X[0]), rtol=1e-6)
