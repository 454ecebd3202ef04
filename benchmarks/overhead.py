"""What does a chain cost over the same lines written by hand: to trace, to compile, and in each step?

Training steps of four networks with weight norm, and with weight norm and noise, in plain JAX and by ``apply``. Then
``apply`` alone on 10 to 3000 arrays of ten shapes. Weight norm by hand is as safe at zero as ours, noise by hand is
that of ``jax.random``. All calls of a table run in one process and in shuffled order, so that ratios are of one machine
and hour.

Run: python benchmarks/overhead.py [repeats]
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import by_hand
from common.networks import Network, convnet, lstm, mlp, transformer
from common.timing import Calls, Rows, heading, rows, show, shuffled

import reparax as rpx

STD = 0.075
COUNTS = (10, 30, 100, 300, 1000, 3000)
LONGEST = 60.0
"""Seconds that a program may take to trace and compile; a way that may take longer is left out."""

Apply = Callable[[Any, jax.Array, Any], Any]
"""From a raw tree, a key and the standard deviation of noise to the effective tree."""
NETWORKS = {"MLP": mlp, "convolution net": convnet, "transformer of 6 layers": transformer, "LSTM": lstm}
TASKS: dict[str, dict[str, Apply]] = {
    "weight norm": {
        "by hand": lambda raw, key, std: by_hand.weight_norm(raw),
        "reparax": lambda raw, key, std: rpx.WeightNorm(axis=-1).apply(raw),
    },
    "weight norm and noise": {
        "by hand": lambda raw, key, std: by_hand.noise(by_hand.weight_norm(raw), key, std),
        "reparax": lambda raw, key, std: (rpx.WeightNorm(axis=-1) >> rpx.VarNoise(std)).apply(raw, key),
    },
}


def start(name: str, params: Any) -> Any:
    """The raw tree of a way."""
    return by_hand.with_lengths(params) if name == "by hand" else rpx.WeightNorm(axis=-1).init(params)


def descent(network: Network, apply: Apply) -> Any:
    """A step of training."""

    def step(raw: Any, key: jax.Array, std: jax.Array, data: jax.Array) -> tuple[Any, jax.Array]:
        loss, slope = jax.value_and_grad(lambda raw: network.loss(apply(raw, key, std), data))(raw)
        return jax.tree.map(lambda w, dw: w - 0.01 * dw, raw, slope), loss

    return jax.jit(step, donate_argnums=0)


def built(function: Any, *given: Any) -> tuple[dict[str, float], Any]:
    """Milliseconds to trace and to compile a function, of which nothing is traced yet, and the program."""
    jax.clear_caches()
    begin = time.perf_counter()
    lowered = function.lower(*given)
    middle = time.perf_counter()
    program = lowered.compile()
    end = time.perf_counter()
    return {"trace": 1e3 * (middle - begin), "compile": 1e3 * (end - middle)}, program


def running(program: Any, raw: Any, data: jax.Array) -> Callable[[float], float]:
    """A call that takes the next step with noise of a given strength, and waits for its loss."""
    state = {"raw": jax.tree.map(jnp.copy, raw)}
    key = jax.random.key(0)

    def call(std: float) -> float:
        state["raw"], loss = program(state["raw"], key, jnp.float32(std), data)
        return float(loss)

    return call


def of_steps(network: Network, ways: dict[str, Apply], repeats: int) -> dict[str, Rows]:
    """Times to trace, to compile and to run a step, once all ways have come to the same losses."""
    times: dict[str, dict[str, list[float]]] = {part: {name: [] for name in ways} for part in ("trace", "compile")}
    runs: dict[str, Callable[[float], float]] = {}
    for _ in range(max(1, repeats // 10)):
        for name, apply in ways.items():
            raw = start(name, network.params)
            given = raw, jax.random.key(0), jnp.float32(STD), network.data
            parts, program = built(descent(network, apply), *given)
            runs[name] = running(program, raw, network.data)
            for part, ms in parts.items():
                times[part][name].append(ms)
    losses = {name: [run(0.0) for _ in range(3)] for name, run in runs.items()}
    for found in losses.values():
        np.testing.assert_allclose(found, losses["by hand"], rtol=1e-4)
    steps: Calls = {name: lambda run=run: run(STD) for name, run in runs.items()}
    return {part: rows(ms) for part, ms in {"step": shuffled(steps, repeats), **times}.items()}


def growth(task: str) -> dict[str, Rows]:
    """Times to trace and compile ``apply`` on more and more arrays."""
    found: dict[str, Rows] = {}
    spent: dict[str, list[float]] = {name: [] for name in TASKS[task]}
    for count in COUNTS:
        shapes = [(32 + 8 * (i % 10), 64) for i in range(count)]
        params = {f"layer{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}
        times: dict[str, dict[str, float]] = {}
        for name, apply in TASKS[task].items():
            if within_reach(spent[name]):
                raw = jax.eval_shape(lambda params, name=name: start(name, params), params)
                times[name], _ = built(jax.jit(apply), raw, jax.random.key(0), jnp.float32(STD))
        for name, parts in times.items():
            spent[name].append(sum(parts.values()))
        for part in ("trace", "compile") if times else ():
            found[f"{task}, {count} arrays, {part}"] = rows(
                {name: [each[part]] for name, each in times.items()}, against="by hand"
            )
    return found


def within_reach(spent: list[float]) -> bool:
    """Whether the next count may take less than the longest time, if three times the arrays cost six times as much."""
    return not spent or 6 * spent[-1] < 1e3 * LONGEST


def measure(repeats: int) -> dict[str, Rows]:
    """All tables, by title."""
    found: dict[str, Rows] = {}
    for net, network in NETWORKS.items():
        for task, ways in TASKS.items():
            tables = of_steps(network(), ways, repeats)
            found |= {f"{net}, {task}, {title}": table for title, table in tables.items()}
    for task in TASKS:
        found |= growth(task)
    return found


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    heading(given)
    show(measure(given))
