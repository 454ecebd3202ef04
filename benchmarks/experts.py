"""Operations and planned memory of LoRA on 64 experts of 512 x 1024, by ``apply``, in factors, and by hand.

The gradient of one layer in bfloat16, of 2048 rows. It is written in three ways: by ``jax.lax.ragged_dot``; by masks,
as Switch Transformer has them; and by looking up a matrix for each row, for 256 rows. Nothing runs: XLA says what its
programs need, on this machine, and on a TPU where libtpu is installed (``pip install "jax[tpu]"``).

Run: python benchmarks experts
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common.timing import Rows, exact, heading, show
from jax import Array, lax
from jax.sharding import SingleDeviceSharding
from peak import tpu

import reparax as rpx

EXPERTS, WIDTH, INNER, RANK, ROOM = 64, 512, 1024, 8, 32
LORA = rpx.Freeze() >> rpx.LoRA(RANK, columns=-1, stacked=0)
Product = Callable[[Any, Array, Array], Array]
"""Of matrices of experts, rows, and the expert of each."""


def ragged(w: Array, x: Array, e: Array) -> Array:
    """Rows in the order of their experts."""
    return lax.ragged_dot(x, w, jnp.bincount(e, length=EXPERTS))


def masked(w: Array, x: Array, e: Array) -> Array:
    """Rows at places of their experts."""
    chosen = jax.nn.one_hot(e, EXPERTS, dtype=jnp.int32)
    at = jnp.sum(jnp.cumsum(chosen, 0, dtype=jnp.int32) * chosen, axis=1, dtype=jnp.int32) - 1
    mask = chosen.astype(x.dtype)[:, :, None] * jax.nn.one_hot(at, ROOM, dtype=x.dtype)[:, None]
    own = jnp.einsum("eck,ekn->ecn", jnp.einsum("tec,tk->eck", mask, x), w)
    return jnp.einsum("tec,ecn->tn", mask, own)


def looked_up(w: Array, x: Array, e: Array) -> Array:
    """A matrix for each row."""
    return jnp.einsum("tk,tkn->tn", x, w[e])


WAYS: dict[str, tuple[Product, int]] = {
    "ragged_dot": (ragged, 2048),
    "masks": (masked, 2048),
    "w[expert]": (looked_up, 256),
}


def losses(product: Product) -> dict[str, Callable[..., Array]]:
    """For each way a loss of what trains, of the rest, of rows, and of the expert of each."""

    def loss(y: Array) -> Array:
        return jnp.mean(jnp.tanh(y.astype(jnp.float32)) ** 2)

    def apply(free: Any, fixed: Any, x: Array, e: Array) -> Array:
        return loss(product(LORA.apply(rpx.combine(free, fixed))["w"].astype(x.dtype), x, e))

    def by_hand(free: Any, fixed: Any, x: Array, e: Array) -> Array:
        values = rpx.combine(free, fixed)["w"]["@lora"]
        base, a, b = (
            each.astype(x.dtype) for each in (values["@fixed"]["w"]["@freeze"]["@fixed"]["w"], values["a"], values["b"])
        )
        return loss(product(base, x, e) + product(b, product(a, x, e), e))

    return {"by hand": by_hand, "apply": apply, "factored": rpx.factored(apply, (0, 1))}


def planned(fun: Callable[..., Array], rows: int, where: Any) -> dict[str, float]:
    """What the gradient of a loss takes there."""
    like = {"w": jax.ShapeDtypeStruct((EXPERTS, WIDTH, INNER), jnp.float32)}
    free, fixed = rpx.partition(jax.eval_shape(LORA.init, like, jax.random.key(0)))
    data = jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16), jax.ShapeDtypeStruct((rows,), jnp.int32)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), (free, fixed, *data))
    compiled = jax.jit(jax.grad(fun)).lower(*args).compile()
    took: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis()
    return {"GFLOP": cost["flops"] / 1e9, "temporary MiB": took.temp_size_in_bytes / 2**20}


def measure(repeats: int) -> dict[str, Rows]:
    """A table for each way of writing experts, each place and each quantity."""
    del repeats  # as a compiler gives the same program each time
    heading(1)
    places = {"": SingleDeviceSharding(jax.devices()[0]), ", TPU v5p": tpu(1)}
    found: dict[str, dict[str, float]] = {}
    for name, (product, rows) in WAYS.items():
        for way, fun in losses(product).items():
            for place, where in places.items():
                for what, number in ({} if where is None else planned(fun, rows, where)).items():
                    found.setdefault(f"LoRA on experts, {name}{place}: {what}", {})[way] = number
    results = {what: exact(numbers) for what, numbers in found.items()}
    show(results)
    return results


if __name__ == "__main__":
    measure(1)
