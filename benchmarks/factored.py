"""What do products cost that never form the weight, against the same by hand, and against forming it?

Operations and temporary bytes are XLA's, of the compiled gradient of what trains; the base of an adapter is an
argument. By hand means a network whose products are written with the factors.

Run: python benchmarks/factored.py [repeats]
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from common.networks import drawn, transformer
from common.timing import Rows, exact, heading, rows, show, shuffled

import reparax as rpx

KEY, MIB, GIGA = jax.random.key(0), 2**20, 1e9
RANK = 16
Loss = Callable[..., jax.Array]


@jax.tree_util.register_dataclass
@dataclass
class Adapted:
    """A weight whose products are written with its factors, as one writes them by hand."""

    w: jax.Array
    a: jax.Array
    b: jax.Array

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """``x @ self``."""
        return x @ self.w + x @ self.a @ self.b


def by_hand(raw: Any) -> Any:
    """Raw values of ``LoRA``, ready for products."""

    def is_marker(x: Any) -> bool:
        return isinstance(x, dict) and "@lora" in x

    def adapted(x: Any) -> Any:
        values = x["@lora"] if is_marker(x) else None
        return Adapted(values["@fixed"]["w"], values["a"], values["b"]) if values else x

    return jax.tree.map(adapted, raw, is_leaf=is_marker)


# ---- networks of adapted weights


def dense(w: Any, x: jax.Array) -> jax.Array:
    """Four layers."""
    for name in sorted(w):
        x = jnp.tanh(x @ w[name])
    return jnp.mean(x**2)


def scanned(w: Any, x: jax.Array) -> jax.Array:
    """The same under a scan."""
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w["w"])[0] ** 2)


def networks() -> dict[str, tuple[Callable[[Any, jax.Array], jax.Array], Any, jax.Array, rpx.Parametrization]]:
    """For each name the network, its weights, data, and the adapter."""
    x = jax.random.normal(KEY, (2048, 1024))
    words = transformer(width=512, layers=4)
    return {
        "4 layers of 1024, batch 2048": (
            dense,
            drawn({f"w{i}": (1024, 1024) for i in range(4)}),
            x,
            rpx.LoRA(RANK, columns=-1),
        ),
        "the same, scanned": (scanned, drawn({"w": (4, 1024, 1024)}), x, rpx.LoRA(RANK, columns=-1, stacked=0)),
        "transformer": (
            words.loss,
            words.params,
            words.data,
            rpx.LoRA(RANK, columns=-1, where=lambda path, w: w.ndim == 2 and "layer" in path),
        ),
    }


def ways(network: Any, weights: Any, x: jax.Array, p: rpx.Parametrization) -> dict[str, tuple[Loss, tuple[Any, ...]]]:
    """For each way the loss of what trains, and its arguments."""
    train, rest = rpx.partition(p.init(weights, KEY))

    def apply(train: Any, rest: Any, x: jax.Array) -> jax.Array:
        return network(p.apply(rpx.combine(train, rest)), x)

    def hand(train: Any, rest: Any, x: jax.Array) -> jax.Array:
        return network(by_hand(rpx.combine(train, rest)), x)

    args = train, rest, x
    return {
        "by hand": (hand, args),
        "apply": (apply, args),
        "factored": (rpx.factored(apply), args),
        "remat(factored)": (rpx.remat(rpx.factored(apply)), args),
        "all weights train": (network, (weights, x)),
    }


def adapters(repeats: int) -> dict[str, Rows]:
    """Tables of adapters: operations, bytes, time of a gradient, and time to trace it."""
    found: dict[str, Rows] = {}
    for name, given in networks().items():
        steps = {way: (jax.jit(jax.grad(loss)), args) for way, (loss, args) in ways(*given).items()}
        compiled = {way: step.lower(*args).compile() for way, (step, args) in steps.items()}
        calls = {
            way: lambda program=program, args=steps[way][1]: jax.block_until_ready(program(*args))
            for way, program in compiled.items()
        }
        shuffled(calls, 1)
        found[f"LoRA, {name}: GFLOP"] = exact({w: c.cost_analysis()["flops"] / GIGA for w, c in compiled.items()})
        temporary = {w: c.memory_analysis().temp_size_in_bytes / MIB for w, c in compiled.items()}
        found[f"LoRA, {name}: temporary MiB"] = exact(temporary)
        found[f"LoRA, {name}: ms"] = rows(shuffled(calls, repeats))
        traces = {way: [traced(loss, args) for _ in range(3)] for way, (loss, args) in ways(*given).items()}
        traces["remat"] = [traced(rpx.remat(ways(*given)["apply"][0]), steps["apply"][1]) for _ in range(3)]
        found[f"LoRA, {name}: to trace, ms"] = rows(traces, "remat")
    return found


def traced(loss: Loss, args: Any) -> float:
    """Milliseconds to trace the gradient of a new function."""
    start = time.perf_counter()
    jax.jit(jax.grad(lambda *args: loss(*args))).trace(*args)
    return 1e3 * (time.perf_counter() - start)


# ---- stored numbers


def quantized(layers: int = 8, width: int = 1024, batch: int = 64) -> dict[str, Rows]:
    """Adapters on 4-bit numbers, layers scanned: temporaries of the gradient, of which one float array takes 4 MiB."""
    p = rpx.Quantized("nf4", block_size=64) >> rpx.LoRA(8)
    raw = jax.vmap(lambda w, key: p.init({"w": w}, key))(
        drawn({"w": (layers, width, width)})["w"], jax.random.split(KEY, layers)
    )
    train, rest = rpx.partition(raw)

    def loss(train: Any, rest: Any, x: jax.Array) -> jax.Array:
        layers = rpx.combine(train, rest)
        return jnp.mean(jax.lax.scan(lambda x, layer: (jnp.tanh(x @ p.apply(layer)["w"]), None), x, layers)[0] ** 2)

    ways = {"apply": loss, "factored": rpx.factored(loss), "remat(factored)": rpx.remat(rpx.factored(loss))}
    args = train, rest, jnp.ones((batch, width))
    held = {name: jax.jit(jax.grad(f)).lower(*args).compile() for name, f in ways.items()}
    return {
        f"QLoRA, {layers} layers of {width}, scanned: temporary MiB": exact(
            {name: c.memory_analysis().temp_size_in_bytes / MIB for name, c in held.items()}
        )
    }


# ---- the choice


def choices(repeats: int, width: int = 512) -> dict[str, Rows]:
    """Adapters of several ranks on several numbers of rows: the time of what is chosen, against both."""
    found: dict[str, Rows] = {}
    for batch in (1, 16, 128, 1024):
        for rank in (1, 16, 128):
            given = (
                dense,
                drawn({f"w{i}": (width, width) for i in range(2)}),
                jnp.ones((batch, width)),
                rpx.LoRA(rank, columns=-1),
            )
            chosen = {name: way for name, way in ways(*given).items() if name in ("by hand", "apply", "factored")}
            programs = {
                name: (jax.jit(jax.grad(loss)).lower(*args).compile(), args) for name, (loss, args) in chosen.items()
            }
            calls = {
                name: lambda f=f, args=args: jax.block_until_ready(f(*args)) for name, (f, args) in programs.items()
            }
            shuffled(calls, 2)
            found[f"the choice, {batch} rows, rank {rank}: ms"] = rows(shuffled(calls, 4 * repeats))
    return found


def measure(repeats: int) -> dict[str, Rows]:
    """All tables, by title."""
    return adapters(repeats) | quantized() | choices(repeats)


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    heading(given)
    show(measure(given))
