"""Channels of a convolutional network on digits, pruned by Wanda's scores: as masks, and cut out by ``shrink``.

``python -m benchmarks.smaller`` writes ``benchmarks/results/smaller.json``. It takes some minutes of CPU.
"""

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import reparax as rpx
from benchmarks.common.timing import machine
from benchmarks.evidence.data import digits

FILE = Path(__file__).parent / "results" / "smaller.json"
SEEDS, STEPS, MORE, BATCH, RATE, TURNS = 5, 400, 100, 64, 3e-3, 20
LEFT = (1.0, 0.75, 0.5)
CHANNELS = (1, 16, 32, 32)
AXES = ("NHWC", "HWIO", "NHWC")

Data = tuple[Array, Array]


def start(key: Array) -> dict[str, Any]:
    """Three convolutions with He's weights, and a last layer."""
    keys = jax.random.split(key, len(CHANNELS))
    params = {
        f"conv{i}": {"w": jax.random.normal(keys[i], (3, 3, n, m)) * jnp.sqrt(2 / (9 * n)), "b": jnp.zeros(m)}
        for i, (n, m) in enumerate(itertools.pairwise(CHANNELS))
    }
    n = CHANNELS[-1]
    return {**params, "last": {"w": jax.random.normal(keys[-1], (n, 10)) * jnp.sqrt(1 / n), "b": jnp.zeros(10)}}


def layers(params: Any, x: Array) -> tuple[Array, dict[str, Array]]:
    """The logits, from channels of which the last are averaged over each image; and what each layer reads."""
    x, reads = x.reshape(-1, 8, 8, 1), dict[str, Array]()
    for name in (name for name in params if name.startswith("conv")):
        reads[name] = x
        x = jax.lax.conv_general_dilated(x, params[name]["w"], (1, 1), "SAME", dimension_numbers=AXES)
        x = jax.nn.relu(x + params[name]["b"])
    reads["last"] = x.mean((1, 2))
    return reads["last"] @ params["last"]["w"] + params["last"]["b"], reads


def logits(params: Any, x: Array) -> Array:
    """What the last layer says of each image."""
    return layers(params, x)[0]


def loss(params: Any, x: Array, y: Array) -> Array:
    """The mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


TX = optax.adam(RATE)
STEP = jax.jit(lambda params, state, x, y: TX.update(jax.grad(loss)(params, x, y), state))


@jax.jit
def one_step(params: Any, state: Any, key: Array, data: Data) -> tuple[Any, Any]:
    """A step on images drawn with the key."""
    rows = jax.random.randint(key, (BATCH,), 0, len(data[0]))
    updates, state = TX.update(jax.grad(loss)(params, data[0][rows], data[1][rows]), state)
    return optax.apply_updates(params, updates), state


def trained(params: Any, state: Any, key: Array, data: Data, steps: int) -> tuple[Any, Any]:
    """A network and the optimizer's state after some steps."""
    # A convolution in a loop that XLA's CPU compiles is tens of times slower than in a program of its own.
    for each in jax.random.split(key, steps):
        params, state = one_step(params, state, each, data)
    return params, state


@jax.jit
def scores(params: Any, x: Array) -> Any:
    """The sizes of the weights that read a channel, times the root of its mean square; zero for biases."""

    def of(w: Array, x: Array) -> Array:
        if w.ndim == 4:  # the window of each place, with channels first
            x = jax.lax.conv_general_dilated_patches(x, w.shape[:2], (1, 1), "SAME", dimension_numbers=AXES)
        squares = jnp.mean(jnp.square(x).reshape(-1, x.shape[-1]), axis=0)
        return abs(w) * jnp.sqrt(jnp.moveaxis(squares.reshape(w.shape[-2], *w.shape[:-2]), 0, -1))[..., None]

    reads = layers(params, x)[1]
    return {name: {"w": of(each["w"], reads[name]), "b": jnp.zeros_like(each["b"])} for name, each in params.items()}


def seconds(trees: list[Any], data: Data) -> list[list[float]]:
    """For each network the seconds of a processor for some steps, taken in turns."""
    states, taken = list(map(TX.init, trees)), [list[float]() for _ in trees]
    for turn in range(TURNS + 1):
        for params, state, each in zip(trees, states, taken, strict=True):
            begin = time.process_time()
            jax.block_until_ready(STEP(params, state, data[0][:BATCH], data[1][:BATCH]))
            each += [time.process_time() - begin] if turn else []
    return taken


def measured(params: Any, state: Any, left: float, key: Array) -> dict[str, float]:
    """Losses, the share of digits that are right, bytes, and the processor's time of a step beside masks."""
    train, _, test = digits()
    groups = [group for group in rpx.axes.axis_groups(loss, params, *train) if not group.why_whole]
    masked = rpx.axes.prune_units(params, groups, 1 - left, scores(params, train[0]))
    small = rpx.axes.shrink(rpx.Chain(), masked, groups)
    want, got = logits(masked, test[0]), logits(small, test[0])
    again, _ = trained(small, rpx.axes.shrink(rpx.Chain(), state, groups, like=masked), key, train, MORE)
    taken = seconds([masked, small], train)
    return {
        "loss": float(loss(small, *test)),
        "loss after more steps": float(loss(again, *test)),
        "right": float(jnp.mean(jnp.argmax(logits(again, test[0]), -1) == test[1])),
        "apart": float(jnp.max(abs(got - want)) / jnp.max(abs(want))),
        "bytes": sum(x.nbytes for x in jax.tree.leaves(small)),
        "time beside masks": statistics.median(b / a for a, b in zip(*taken, strict=True)),
    }


def main() -> None:
    """Measures all shares, and writes the file."""
    cells: dict[str, dict[str, list[float]]] = {f"{left:.0%} left": {} for left in LEFT}
    for key in jax.random.split(jax.random.key(0), SEEDS):
        of_start, of_steps, of_more = jax.random.split(key, 3)
        params = start(of_start)
        params, state = trained(params, TX.init(params), of_steps, digits().train, STEPS)
        for left, found in zip(LEFT, cells.values(), strict=True):
            for what, value in measured(params, state, left, of_more).items():
                found.setdefault(what, []).append(value)
    FILE.write_text(json.dumps({**machine(), "cells": cells}, indent=1) + "\n")
    for name, values in cells.items():
        told = {what: f"{statistics.mean(x):.4g} ({min(x):.4g} to {max(x):.4g})" for what, x in values.items()}
        print(f"{name}:", told)


if __name__ == "__main__":
    main()
