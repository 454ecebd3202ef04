"""The loss between two networks on digits, before and after ``align``: git-re-basin's barrier, five seeds each.

``python -m benchmarks.aligned`` writes ``benchmarks/results/aligned.json``. It takes about three minutes of CPU.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import reparax as rpx
from benchmarks.common.timing import machine
from benchmarks.evidence.data import digits

FILE = Path(__file__).parent / "results" / "aligned.json"
SEEDS, STEPS, BATCH, RATE = 5, 1500, 64, 1e-3
BETWEEN = np.linspace(0, 1, 11)
NETWORKS = {"MLP, 64 units": (64, 2, False), "MLP, 512 units": (512, 2, False), "residual, 64 units": (64, 2, True)}
"""The width, the number of hidden layers or blocks, and whether these are added to a stream."""


def start(key: Array, width: int, depth: int, *, residual: bool) -> dict[str, Any]:
    """Weights as He drew them, and no biases yet."""
    sizes = {"first": (64, width), "last": (width, 10)}
    for i in range(depth):
        sizes |= {f"up{i}": (width, width), f"down{i}": (width, width)} if residual else {f"up{i}": (width, width)}
    if not residual:
        sizes.pop(f"up{depth - 1}")
    keys = jax.random.split(key, len(sizes))
    return {
        name: {"w": jax.random.normal(each, shape) * jnp.sqrt(2 / shape[0]), "b": jnp.zeros(shape[1])}
        for each, (name, shape) in zip(keys, sizes.items(), strict=True)
    }


def forward(params: Any, x: Array, *, residual: bool) -> Array:
    """The logits; residual networks have a norm without scale before each block, and before the last layer."""

    def dense(name: str, x: Array) -> Array:
        return x @ params[name]["w"] + params[name]["b"]

    def norm(x: Array) -> Array:
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    x = dense("first", x) if residual else jax.nn.relu(dense("first", x))
    for name in (name for name in params if name.startswith("up")):
        if residual:
            x = x + dense(name.replace("up", "down"), jax.nn.relu(dense(name, norm(x))))
        else:
            x = jax.nn.relu(dense(name, x))
    return dense("last", norm(x) if residual else x)


def loss(params: Any, x: Array, y: Array, *, residual: bool) -> Array:
    """The mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(forward(params, x, residual=residual), y).mean()


def trained(key: Array, data: Any, shape: tuple[int, int, bool]) -> Any:
    """A network after some steps of Adam."""
    (x, y), (width, depth, residual) = data, shape
    params, tx = start(key, width, depth, residual=residual), optax.adam(RATE)

    def step(carry: Any, key: Array) -> tuple[Any, None]:
        params, state = carry
        rows = jax.random.randint(key, (BATCH,), 0, len(x))
        updates, state = tx.update(jax.grad(loss)(params, x[rows], y[rows], residual=residual), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), jax.random.split(key, STEPS))[0][0]


def measured(shape: tuple[int, int, bool]) -> dict[str, dict[str, list[float]]]:
    """For each way the barriers of five pairs on images held out, and how often the merged network is right."""
    train, _, test = digits()
    residual = shape[2]
    keys = jax.random.split(jax.random.key(0), 2 * SEEDS)
    networks = jax.jit(jax.vmap(lambda key: trained(key, train, shape)))(keys)
    pairs = [[jax.tree.map(lambda x, i=i: x[i], networks) for i in (2 * n, 2 * n + 1)] for n in range(SEEDS)]
    held = functools.partial(loss, residual=residual)
    groups = rpx.axis_groups(held)(pairs[0][0], *train)
    inputs = jax.jit(rpx.inputs(held))

    @jax.jit
    def along(a: Any, b: Any) -> Array:
        mixed = jax.vmap(lambda t: jax.tree.map(lambda x, y: (1 - t) * x + t * y, a, b))(
            jnp.asarray(BETWEEN, "float32")
        )
        return jax.vmap(lambda params: held(params, *test))(mixed)

    @jax.jit
    def right(params: Any) -> Array:
        return jnp.mean(jnp.argmax(forward(params, test[0], residual=residual), -1) == test[1])

    ways = {
        "without": lambda a, b: b,
        "by weights": lambda a, b: rpx.align(a, b, groups),
        "by data": lambda a, b: rpx.align(a, b, groups, seen=inputs(a, *train)),
    }
    found: dict[str, dict[str, list[float]]] = {}
    for name, way in ways.items():
        others = [(a, way(a, b)) for a, b in pairs]
        curves = [np.asarray(along(a, b)) for a, b in others]
        found[name] = {
            "barrier": [float(np.max(c - (1 - BETWEEN) * c[0] - BETWEEN * c[-1])) for c in curves],
            "right, merged": [float(right(rpx.merge([a, b]))) for a, b in others],
            "right, apart": [float(np.mean([right(a), right(b)])) for a, b in others],
        }
    return found


def main() -> None:
    """Measures all networks, and writes the file."""
    cells = {name: measured(shape) for name, shape in NETWORKS.items()}
    FILE.write_text(json.dumps({**machine(), "cells": cells}, indent=1) + "\n")
    for name, ways in cells.items():
        for way, values in ways.items():
            print(f"{name}, {way}:", {what: f"{np.mean(x):.3f} ± {np.std(x):.3f}" for what, x in values.items()})


if __name__ == "__main__":
    main()
