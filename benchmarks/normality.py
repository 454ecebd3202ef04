"""Are the draws normal? Moments, tails, shares and correlations of very many numbers, in standard errors.

Blocks of 2^20 numbers as ``VarNoise`` draws them, for different keys and two paths. For each block, on the device: the
sums of the first six powers, the counts beyond 3, 4, 5 and 5.5 standard deviations on each side, the counts of 64
intervals of equal probability, and sums of products with the neighbours along both axes, the next key and another path,
of numbers and of their squares. Then the deviation of each total from what independent normal numbers would give, in
standard errors; for the intervals the chi-square, as the normal number of the same probability. ``jax.random`` is
measured beside it. The largest of about 40 deviations is 3 with a chance of a tenth.

Run: python benchmarks/normality.py [millions]
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common.timing import Rows, heading, rows, show
from scipy import special

import reparax as rpx

SIDE = 1024
TAILS = (3.0, 4.0, 5.0, 5.5)
EDGES = special.ndtri(np.arange(1, 64) / 64)
Draw = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def ours(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The noise of two paths."""
    zeros = {name: jnp.zeros((SIDE, SIDE)) for name in ("a", "b")}
    noise = rpx.VarNoise(1.0).apply(zeros, key)
    return noise["a"], noise["b"]


def by_jax(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two arrays by ``jax.random``."""
    first, second = jax.random.split(key)
    return jax.random.normal(first, (SIDE, SIDE)), jax.random.normal(second, (SIDE, SIDE))


def sums(draw: Draw, key: jax.Array, step: jax.Array) -> dict[str, jax.Array]:
    """What is summed of one block, in float32 by rows; the totals are summed in float64."""
    x, other = draw(jax.random.fold_in(key, step))
    after, _ = draw(jax.random.fold_in(key, step + 1))
    total = {f"mean of power {k}": jnp.sum(x**k, axis=1) for k in range(1, 7)}
    for size in TAILS:
        total[f"share above {size}"] = jnp.sum(x > size, axis=1)
        total[f"share below -{size}"] = jnp.sum(x < -size, axis=1)
    near = {"the next entry": jnp.roll(x, 1, 1), "the next row": jnp.roll(x, 1, 0), "7 rows on": jnp.roll(x, 7, 0)}
    for name, y in {**near, "the next key": after, "another path": other}.items():
        total[f"product with {name}"] = jnp.sum(x * y, axis=1)
        total[f"product of squares with {name}"] = jnp.sum((x * x - 1) * (y * y - 1), axis=1)
    below = [jnp.sum(x < np.float32(edge), axis=1) for edge in EDGES]
    return total | {"below": jnp.stack(below)}


def deviations(total: Mapping[str, Any], count: int) -> dict[str, float]:
    """The deviation of each total, in standard errors."""
    found: dict[str, float] = {}
    moments = [math.prod(range(1, k, 2)) if k % 2 == 0 else 0 for k in range(13)]
    for name, value in total.items():
        if name == "below":
            shares = np.diff(np.concatenate([[0], value, [count]]))
            chi = float(np.sum((shares - count / 64) ** 2) / (count / 64))
            found["chi-square of 64 intervals"] = float(-special.ndtri(special.chdtrc(63, chi)))
            continue
        last = name.split()[-1]
        if name.startswith("mean"):
            mean, variance = moments[int(last)], moments[2 * int(last)] - moments[int(last)] ** 2
        elif name.startswith("share"):
            mean = float(special.ndtr(-abs(float(last))))
            variance = mean * (1 - mean)
        else:
            mean, variance = 0, 4 if "squares" in name else 1
        found[name] = (value / count - mean) / math.sqrt(variance / count)
    return found


def drawn(blocks: int, draw: Draw) -> dict[str, float]:
    """The deviations of so many blocks."""
    key, block = jax.random.key(2026), jax.jit(lambda key, step: sums(draw, key, step))
    total: dict[str, Any] = {}
    for step in range(blocks):
        found = block(key, jnp.uint32(step))
        added = {name: np.asarray(x, np.float64).sum(-1) for name, x in found.items()}
        total = {name: total.get(name, 0) + x for name, x in added.items()}
    return deviations(total, blocks * SIDE * SIDE)


def measure(millions: int) -> dict[str, Rows]:
    """A table for each statistic."""
    heading(1)
    blocks = max(1, round(millions * 1e6 / SIDE**2))
    found = {way: drawn(blocks, draw) for way, draw in {"VarNoise": ours, "jax.random": by_jax}.items()}
    results = {
        f"{blocks * SIDE**2:,} normal numbers, {name}: standard errors": rows(
            {way: [values[name]] for way, values in found.items()}, against="no way"
        )
        for name in found["VarNoise"]
    }
    show(results)
    return results


if __name__ == "__main__":
    measure(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
