"""What do stored numbers take, at rest and in a compiled step, and what does reading them cost?

A stack of 16 matrices of 1024 x 1024, applied one after the other to 32 rows. Bytes are those of the arguments and of
the temporaries of the compiled program, by XLA's own account; the float array of one layer has 4 MiB. First ``apply``
makes all weights before the network runs; then the layers are a scan, whose body makes its own.

Run: python benchmarks/stored.py [repeats]
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common.timing import Rows, exact, heading, rows, show, shuffled

import reparax as rpx

LAYERS, WIDTH, BATCH, MIB = 16, 1024, 32, 2**20
CHAINS = {
    "float32": rpx.Chain(),
    "int8, block 256": rpx.Quantized("int8", block_size=256),
    "int4, block 64, twice": rpx.Quantized("int4", block_size=64, double_quant=True),
    "nf4, block 64, twice": rpx.Quantized("nf4", block_size=64, double_quant=True),
    "float8, block 256": rpx.Quantized("float8_e4m3fn", block_size=256),
}


def before(p: rpx.Parametrization) -> tuple[Any, Callable[[Any, jax.Array], jax.Array]]:
    """All weights, then the network."""
    weights = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 32
    raw = p.init({f"layer{i:02}": w for i, w in enumerate(weights)})

    def run(raw: Any, x: jax.Array) -> jax.Array:
        for w in p.apply(raw).values():
            x = jnp.tanh(x @ w)
        return x

    return raw, run


def inside(p: rpx.Parametrization) -> tuple[Any, Callable[[Any, jax.Array], jax.Array]]:
    """A scan over the layers, each of which makes its weight."""
    weights = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 32
    raw = jax.vmap(lambda w: p.init({"layer": w}))(weights)

    def run(raw: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, layer: (jnp.tanh(x @ p.apply(layer)["layer"]), None), x, raw)[0]

    return raw, run


def measure(repeats: int) -> dict[str, Rows]:
    """All tables, by title."""
    x, found = jnp.ones((BATCH, WIDTH)), dict[str, Rows]()
    for how, build in (("weights first", before), ("layers scanned", inside)):
        calls: dict[str, Callable[[], Any]] = {}
        held: dict[str, float] = {}
        temporary: dict[str, float] = {}
        for name, p in CHAINS.items():
            raw, run = build(p)
            compiled = jax.jit(run).lower(raw, x).compile()
            held[name] = sum(a.nbytes for a in jax.tree.leaves(raw)) / (LAYERS * WIDTH * WIDTH)
            temporary[name] = compiled.memory_analysis().temp_size_in_bytes / MIB
            calls[name] = lambda compiled=compiled, raw=raw: jax.block_until_ready(compiled(raw, x))
        found["bytes a weight"] = exact(held)
        found[f"temporary MiB, {how}"] = exact(temporary)
        found[f"milliseconds, {how}"] = rows(shuffled(calls, repeats))
    return found


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    heading(given)
    show(measure(given))
