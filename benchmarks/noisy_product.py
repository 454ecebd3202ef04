"""Is a product with a noisy weight worth a kernel of its own, which draws in its registers and stores no noisy weight?

``x @ (w + std * noise)`` on a GPU, for weights of 4096 x 4096: what XLA makes of ``VarNoise``, which writes the noisy
weight once, and a Triton kernel by Pallas with the same words, in which each block of 64 rows of ``x`` draws the whole
weight anew. A product without noise is beside them. A call is twenty products.

Run: python benchmarks/noisy_product.py [repeats]
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common.timing import Calls, Rows, heading, rows, show, shuffled

import reparax as rpx
from reparax.numerics import threefry

WIDTH, ROWS, STD, TIMES = 4096, (64, 512, 4096), 0.075, 20
BLOCKS = {"kernel, blocks of 32 columns": (32, 64, 8, 3), "kernel, blocks of 16 columns": (16, 128, 4, 2)}
"""Columns and inputs of a block, warps and stages; the best of six that were tried."""


def noise(key: tuple[Any, Any], count: jax.Array) -> jax.Array:
    """Normal numbers from the words of a counter."""
    high, low = threefry.cipher(key, (jnp.zeros_like(count), count))
    return STD * threefry.normal(high ^ low)


def noisy_dot(x: jax.Array, w: jax.Array, key: jax.Array, columns: int, inputs: int, warps: int, stages: int) -> Any:
    """The product as one kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (m, k), n = x.shape, w.shape[1]

    def kernel(key: Any, x: Any, w: Any, out: Any) -> None:
        start = (pl.program_id(1) * columns).astype(jnp.uint32)

        def add(i: Any, total: jax.Array) -> jax.Array:
            block = (inputs, columns)
            row = jax.lax.broadcasted_iota(jnp.uint32, block, 0) + (i * inputs).astype(jnp.uint32)
            column = jax.lax.broadcasted_iota(jnp.uint32, block, 1) + start
            noisy = w[pl.ds(i * inputs, inputs), :] + noise((key[0], key[1]), row * jnp.uint32(n) + column)
            return total + jnp.dot(x[:, pl.ds(i * inputs, inputs)], noisy, preferred_element_type=jnp.float32)

        out[...] = jax.lax.fori_loop(0, k // inputs, add, jnp.zeros(out.shape, jnp.float32))

    return pl.pallas_call(
        kernel,
        grid=(m // 64, n // columns),
        in_specs=[
            pl.BlockSpec((2,), lambda i, j: (0,)),
            pl.BlockSpec((64, k), lambda i, j: (i, 0)),
            pl.BlockSpec((k, columns), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((64, columns), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
    )(jax.random.key_data(key), x, w)


def by_varnoise(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
    """The product with a noisy weight."""
    return x @ rpx.VarNoise(STD).apply({"w": w}, key)["w"]


WAYS: dict[str, Callable[..., Any]] = {
    "no noise": lambda x, w, key: x @ w,
    "VarNoise": by_varnoise,
    **{name: lambda x, w, key, blocks=blocks: noisy_dot(x, w, key, *blocks) for name, blocks in BLOCKS.items()},
}


def require_right(found: jax.Array, x: jax.Array, w: jax.Array, key: jax.Array) -> None:
    """Compares a kernel's product with one of full digits."""
    first, second = jax.random.key_data(key)
    count = jnp.arange(w.size, dtype=jnp.uint32).reshape(w.shape)
    wanted = jnp.dot(x, w + noise((first, second), count), precision="highest")
    np.testing.assert_array_less(jnp.linalg.norm(found - wanted), 1e-3 * jnp.linalg.norm(wanted))  # TF32


def measure(repeats: int) -> dict[str, Rows]:
    """A table for each number of rows, by title."""
    found: dict[str, Rows] = {}
    if jax.default_backend() != "gpu":
        print("noisy_product has a kernel for GPUs alone")
        return found
    for count in ROWS:
        x, w = (jax.random.normal(jax.random.key(i), (n, WIDTH)) / 64 for i, n in enumerate((count, WIDTH)))
        given = x, w, jax.random.key(2)
        programs = {name: jax.jit(way).lower(*given).compile() for name, way in WAYS.items()}
        for name in BLOCKS:
            require_right(programs[name](*given), *given)
        calls: Calls = {
            name: lambda program=program, given=given: jax.block_until_ready([program(*given) for _ in range(TIMES)])
            for name, program in programs.items()
        }
        shuffled(calls, 1)
        found[f"{TIMES} products of {count} rows and {WIDTH} x {WIDTH} weights: ms"] = rows(shuffled(calls, repeats))
    return found


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    heading(given)
    show(measure(given))
