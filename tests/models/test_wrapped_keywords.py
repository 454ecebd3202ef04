"""A model may call its own arguments as it likes: no name of ours is in their way."""

from typing import Any

import equinox as eqx
import haiku as hk
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


def scaled(x: Any, variables: float = 1, self: float = 1, fun: float = 1, raw: float = 1) -> Any:
    return variables * self * fun * raw * hk.Linear(2)(x)


def test_of_haiku() -> None:
    for transform, count in ((hk.transform, 1), (hk.transform_with_state, 2)):
        network = rpx.haiku.parametrized(transform(scaled), rpx.WeightNorm())
        start: Any = network.init(jax.random.key(0), X, variables=1.0, self=2.0)
        variables = start if count == 2 else (start,)
        all_named: Any = {}, {"variables": 2.0, "self": 3.0, "raw": 5.0}
        outputs = [network.apply(*variables, None, X, **named) for named in all_named]
        plain, times_30 = outputs if count == 1 else [output for output, _ in outputs]
        np.testing.assert_allclose(times_30, 30 * plain, rtol=1e-6)


def test_of_what_reads_a_program() -> None:
    def loss(params: Any, x: Any, fun: Any = 1, module: Any = 1, p: Any = 1, who: Any = 1, args: Any = 1) -> Any:
        return ((x @ params["w"]) ** 2).sum() * fun * module * p * who * args

    params: Any = {"w": np.ones((3, 2), np.float32)}
    named: Any = {"fun": 2, "module": 3, "p": 5, "who": 7, "args": 11}
    assert rpx.roles(loss, params, X, **named)["w"].outputs == (1,)
    assert not rpx.axes.check_axes(rpx.WeightNorm(axis=-1), loss, params, X, **named)
    assert str(rpx.explain(rpx.factored(loss), params, X, **named))
    assert str(rpx.transforms.saved_residuals(loss, params, X, **named))
    found = rpx.linen.roles(Linen(), X, plain=2, rngs=3, method=4)
    assert found["dense"]["kernel"].outputs == (1,)
