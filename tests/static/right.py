"""Uses that type checkers accept, and the types that they find."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax

import reparax as rpx

Model = dict[str, jax.Array]
model: Model = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
key = jax.random.key(0)


def loss(raw: Model, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return scale * jnp.sum(p.apply(raw, key)["w"] @ x)


# A model keeps its type, and a loss its signature.
p = rpx.WeightNorm() >> rpx.VarNoise(0.1)
assert_type(p, rpx.Parametrization)
assert_type(p.init(model), Model)
assert_type(p.init(model, key), Model)
assert_type(p.apply(p.init(model), key), Model)
assert_type(p.apply(p.init(model), key, upto=1), Model)
assert_type(p.fold(p.init(model)), Model)
assert_type(p.update(p.init(model)), Model)
assert_type(p.original(p.init(model)), Model)
assert_type(p.set(p.init(model), "w", jnp.ones((4, 4))), Model)
assert_type(rpx.partition(model), tuple[Model, Model])
assert_type(rpx.combine(*rpx.partition(model)), Model)
assert_type(rpx.transfer(p, rpx.Chain(), model), Model)
assert_type(rpx.remat(loss)(model, jnp.ones(4), scale=2.0), jax.Array)
assert_type(rpx.factored(loss)(model, jnp.ones(4)), jax.Array)
assert_type(rpx.transforms.local_reparametrization(loss)(model, jnp.ones(4)), jax.Array)

# Numbers: known, traced, by path, by array. Words, axes, selections.
rpx.VarNoise(1)
rpx.VarNoise(np.float32(0.1), relative="std", axis=(0, 1))
rpx.VarNoise(optax.linear_schedule(0.0, 0.1, 10)(3))
rpx.VarNoise({"w": 0.1}, where=lambda path, w: w.ndim == 2)
rpx.WeightDropout(lambda path, w: 0.1, broadcast_dims=0)
rpx.LoRA(4, 8, init_weights="pissa", rows="inputs", where=rpx.all_but(".*/head"))
rpx.Tie({"out": ("in", jnp.transpose)}, unequal="overwrite")
rpx.MagnitudePruning((0.5, 0.5), axis=-1)
rpx.MagnitudePruning(count=3)
rpx.Quantized("nf4", block_size=64, double_quant=True)
rpx.FakeQuantized("ternary", step="learned")
rpx.Orthogonal("expm", outside="raise")
rpx.Positive("exp", stacked=0)


class Tempered(rpx.Perturbation):
    """A stage of a user."""

    stochastic = False
    heat: rpx.stage.Number = rpx.stage.number_field(positive=True, default=1.0)
    axis: rpx.stage.Axes = rpx.stage.axes_field(default=-1, kw_only=True)

    def apply_leaf(self, w: jax.Array, key: jax.Array) -> jax.Array:
        return w / self.heat


assert_type(Tempered({".*": 2.0}, axis="out") >> rpx.Freeze(), rpx.Parametrization)
