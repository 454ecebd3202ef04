"""Uses that type checkers refuse, one in each line with a comment: lint says where a comment is not needed."""

import jax
import jax.numpy as jnp

import reparax as rpx

model = {"w": jnp.ones((4, 4))}
p = rpx.WeightNorm() >> rpx.VarNoise(0.1)
raw = p.init(model)


def loss(raw: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.sum(p.fold(raw)["w"] @ x)


rpx.VarNoise("0.1")  # type: ignore[arg-type]
rpx.LoRA(4, init_weights="pisa")  # type: ignore[arg-type]
rpx.Tie({"a": "b"}, unequal="overwrit")  # type: ignore[arg-type]
rpx.WeightNorm(dim=0)  # type: ignore[call-arg]
rpx.WeightNorm() + rpx.VarNoise(0.1)  # type: ignore[operator]
rpx.WeightNorm() >> 0.1  # type: ignore[operator]
p.aply(raw)  # type: ignore[attr-defined]
p.fold(raw).kernel  # type: ignore[attr-defined]
p.apply(raw, upto="last")  # type: ignore[arg-type]
rpx.LoRA()  # type: ignore[call-arg]
rpx.LoRA("4")  # type: ignore[arg-type]
rpx.Orthogonal("exp")  # type: ignore[arg-type]
rpx.Positive(outside="project")  # type: ignore[arg-type]
rpx.Quantized("int16")  # type: ignore[arg-type]
rpx.FakeQuantized("int8", step="learnt")  # type: ignore[arg-type]
rpx.VarNoise(0.1, relative="mean")  # type: ignore[arg-type]
rpx.VarNoise(0.1, where=3)  # type: ignore[arg-type]
rpx.remat(loss)(raw)  # type: ignore[call-arg]
rpx.factored(loss)(raw, jnp.ones(4), 3)  # type: ignore[call-arg]
rpx.remat(loss, keep="mask")  # type: ignore[arg-type]
rpx.transforms.local_reparametrization(loss)(raw, "x")  # type: ignore[arg-type]
rpx.WeightNrm()  # type: ignore[attr-defined]
rpx.partition(raw).free  # type: ignore[attr-defined]
rpx.remat(loss)(raw, jnp.ones(4)).kernel  # type: ignore[attr-defined]
rpx.norms.LoRA  # type: ignore[attr-defined]
rpx.WeightDropout(rate=[0.1])  # type: ignore[arg-type]
rpx.Chain([rpx.WeightNorm()])  # type: ignore[arg-type]
p(model)  # type: ignore[operator]
