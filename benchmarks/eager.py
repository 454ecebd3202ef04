"""What does a gradient cost without ``jax.jit``, as in the first lines of a notebook, over the same lines by hand?

The loss of one layer with weight norm and noise, with the chain made once and made anew in each call; by hand in plain
JAX, and by hand under ``jax.checkpoint``, which keeps nothing of the weights either. Nothing is compiled any more when
times are taken. All calls run in shuffled order.

Run: python benchmarks/eager.py [repeats]
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common import by_hand
from common.timing import Calls, Rows, heading, rows, show, shuffled

import reparax as rpx

STD = 0.1
P = rpx.WeightNorm(axis=-1) >> rpx.VarNoise(STD)
EFFECTIVE: dict[str, Callable[[Any, jax.Array], Any]] = {
    "by hand": lambda raw, key: by_hand.noise(by_hand.weight_norm(raw), key, STD),
    "by hand, under jax.checkpoint": jax.checkpoint(lambda raw, key: by_hand.noise(by_hand.weight_norm(raw), key, STD)),
    "reparax": P.apply,
    "reparax, chain made anew": lambda raw, key: (rpx.WeightNorm(axis=-1) >> rpx.VarNoise(STD)).apply(raw, key),
}
GRADIENTS: dict[str, Callable[[Any, Any], Any]] = {
    "jax.grad": lambda loss, raw: jax.grad(loss)(raw),
    "jax.vjp": lambda loss, raw: jax.vjp(loss, raw)[1](jnp.float32(1)),
    "jax.linearize": lambda loss, raw: jax.linearize(loss, raw)[1](raw),
    "jax.hessian": lambda loss, raw: jax.hessian(loss)(raw),
}


def measure(repeats: int) -> dict[str, Rows]:
    """All tables, by title."""
    params, x, key = {"w": jax.random.normal(jax.random.key(0), (8, 4))}, jnp.ones((5, 8)), jax.random.key(1)
    found: dict[str, Rows] = {}
    for title, gradient in GRADIENTS.items():
        calls: Calls = {}
        for name, effective in EFFECTIVE.items():
            raw = P.init(params) if name.startswith("reparax") else by_hand.with_lengths(params)

            def loss(raw: Any, effective: Any = effective) -> jax.Array:
                return jnp.mean(jnp.square(x @ effective(raw, key)["w"]))

            calls[name] = lambda loss=loss, raw=raw, gradient=gradient: jax.block_until_ready(gradient(loss, raw))
        shuffled(calls, 2)  # compiles
        found[title] = rows(shuffled(calls, repeats))
    return found


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    heading(given)
    show(measure(given))
