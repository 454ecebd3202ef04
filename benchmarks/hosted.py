"""What of a frozen base travels, as the compiler of a TPU plans it: from the host, and between four chips.

The gradient of LoRA on 16 scanned layers of 2048 x 2048, whose body moves what its layer needs: from the host to the
device, and from the parts on four chips to whole matrices. Counted are MiB of the arguments on the device and on the
host, of the temporaries, and the bytes of all-gathers for each weight, forward and backward. No TPU is needed, but its
compiler is: pip install 'jax[tpu]'.

Run: python benchmarks hosted
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from common.timing import Rows, exact, heading, show
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from peak import tpu

import reparax as rpx

LAYERS, WIDTH, BATCH, MIB = 16, 2048, 64, 2**20
SIZES = {"f32": 4, "bf16": 2, "s8": 1, "u8": 1}
BASES = {"bfloat16": rpx.Freeze(), "nf4": rpx.Quantized("nf4", block_size=64)}


def gathered(text: str) -> float:
    """The bytes that one device has after all all-gathers, for each weight; those of a loop count for each layer."""
    found = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", text)
    return sum(SIZES[kind] * math.prod(map(int, shape.split(","))) for kind, shape in found) / WIDTH**2


def planned(base: rpx.Parametrization, chips: int, *, moves: bool, memory: str | None) -> dict[str, float]:
    """The program of a gradient; ``moves``: the body of the scan says where its layer goes."""
    p, dtype = base >> rpx.LoRA(2, columns=-1), jnp.bfloat16
    lies_there = tpu(chips)
    if lies_there is None:
        raise SystemExit("libtpu is not installed, so there is no compiler of a TPU: pip install 'jax[tpu]'")
    mesh = lies_there.mesh
    cut, whole = P("x", None) if chips > 1 else P(), P()
    like = jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)

    def lies(spec: P, memory: str | None = None) -> Any:
        return p.shardings({"w": spec}, mesh, like={"w": like}, memory_kind=memory)

    def stacked(x: Any, at: NamedSharding) -> Any:
        sharding = NamedSharding(mesh, P(None, *at.spec), memory_kind=at.memory_kind)
        return jax.ShapeDtypeStruct((LAYERS, *x.shape), x.dtype, sharding=sharding)

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        here = jax.lax.with_sharding_constraint(jax.device_put(layer, lies(cut)), lies(whole)) if moves else layer
        return jnp.tanh(x @ p.apply(here)["w"]), None

    def loss(free: Any, fixed: Any, x: jax.Array) -> jax.Array:
        out, _ = jax.lax.scan(jax.checkpoint(body), x, rpx.combine(free, fixed))
        return jnp.mean(out.astype(jnp.float32) ** 2)

    one = jax.eval_shape(p.init, {"w": like}, jax.random.key(0))
    free, fixed = rpx.partition(jax.tree.map(stacked, one, lies(cut, memory)))
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), dtype, sharding=NamedSharding(mesh, cut))
    compiled = jax.jit(jax.value_and_grad(loss)).lower(free, fixed, x).compile()
    took: Any = compiled.memory_analysis()
    sizes = (took.argument_size_in_bytes, took.host_argument_size_in_bytes, took.temp_size_in_bytes)
    named = dict(zip(("MiB of arguments", "MiB of arguments on the host", "temporary MiB"), sizes, strict=True))
    bytes_gathered = {"bytes gathered for each weight": gathered(compiled.as_text())} if chips > 1 else {}
    return {name: size / MIB for name, size in named.items()} | bytes_gathered


def measure(repeats: int) -> dict[str, Rows]:
    """A table for each quantity."""
    del repeats  # as a compiler gives the same program each time
    heading(1)
    found: dict[str, dict[str, float]] = {}
    for name, base in BASES.items():
        for where, memory in (("the device", None), ("the host", "pinned_host")):
            for what, number in planned(base, 1, moves=True, memory=memory).items():
                found.setdefault(what, {})[f"{name} on {where}"] = number
        for how, moves in (("as the compiler chooses", False), ("as its body says", True)):
            for what, number in planned(base, 4, moves=moves, memory=None).items():
                found.setdefault(what, {})[f"{name} on four chips, gathered {how}"] = number
    results = {what: exact(numbers) for what, numbers in found.items()}
    show(results)
    return results


if __name__ == "__main__":
    measure(1)
