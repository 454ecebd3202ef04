"""How much longer do gradients take to trace under ``factored``, ``local_reparametrization`` and ``remat``?

Each against the gradient of the same loss without it. Every call traces a new function, so JAX remembers nothing but
what the network's own ``jit`` functions do. Nothing runs, and no array is made. Milliseconds of the processor, of calls
that take turns in one process, without collecting garbage, as in ``timeit``; ratios are of one turn.

Run: python benchmarks/tracing.py [repeats]
"""

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common import language
from common.networks import transformer
from common.timing import Rows, heading, rows, show
from peak import KEY

import reparax as rpx

Loss = Callable[..., jax.Array]
Traced = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
"""For each name a function, and the shapes of its arguments."""


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """A shape."""
    return jax.ShapeDtypeStruct(shape, dtype)


def dense(layers: int = 24, width: int = 512, batch: int = 512) -> tuple[Loss, Any, Any]:
    """Layers one after the other, with a norm, a bias and a residual each."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        for i in range(layers):
            own = w[f"layer{i}"]
            h = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
            x = x + jax.nn.gelu(h @ own["kernel"] + own["bias"])
        return jnp.mean(jnp.square(x))

    layer = {"kernel": array(width, width), "bias": array(width)}
    return loss, {f"layer{i}": layer for i in range(layers)}, array(batch, width)


def gpt2() -> tuple[Loss, Any, Any]:
    """A transformer of the sizes of GPT-2, unrolled."""
    losses: list[Loss] = []

    def built() -> Any:
        network = transformer(768, 12, 64, 1, 50257)
        losses.append(network.loss)
        return network.params, network.data

    params, words = jax.eval_shape(built)
    return losses[0], params, words


def smollm() -> tuple[Loss, Any, Any]:
    """The language model whose layers are scanned."""
    return language.loss, language.params(), array(2, 65, dtype=jnp.int32)


NETWORKS = {"24 dense layers": dense, "GPT-2": gpt2, "SmolLM2, scanned": smollm}


def ways(loss: Loss, params: Any, data: Any, stacked: int | tuple[()] = ()) -> dict[str, Traced]:
    """For each table the functions to trace; the first is what the others are compared with."""
    kernels = rpx.all_but(".*(embed|bias|norm|scale)")
    lora = rpx.Freeze(where=".*") >> rpx.LoRA(8, columns=-1, where=kernels, stacked=stacked)
    chains = {
        "LoRA": (lora, ("factored",)),
        "noise": (rpx.VarNoise(0.1, where=kernels), ("local_reparametrization", "remat")),
        "weight norm": (rpx.WeightNorm(axis=-1, where=kernels, stacked=stacked), ("remat", "factored")),
    }
    tables: dict[str, Traced] = {}
    for name, (p, transforms) in chains.items():
        train, rest = rpx.partition(jax.eval_shape(p.init, params, KEY))

        def of_train(train: Any, key: jax.Array, rest: Any, data: Any, p: Any = p) -> jax.Array:
            return loss(p.apply(rpx.combine(train, rest), key), data)

        losses = {"apply": of_train} | {each: getattr(rpx.transforms, each)(of_train) for each in transforms}
        args = train, KEY, rest, data
        tables[name] = {way: (jax.grad(function), args) for way, function in losses.items()}
    return tables


def seconds(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """The time of the processor to trace a new function, after garbage of earlier calls is gone, and without more."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    jax.jit(lambda *args: function(*args)).trace(*args)
    taken = time.process_time() - start
    gc.enable()
    return taken


def in_turns(calls: Traced, repeats: int) -> Rows:
    """Milliseconds to trace each, one after the other, after one round that does not count; and ratios with spread."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + repeats):
        for name, call in calls.items():
            taken = 1e3 * seconds(*call)
            if turn:
                times[name].append(taken)
    return rows(times)


def measure(repeats: int) -> dict[str, Rows]:
    """All tables, by title."""
    found: dict[str, Rows] = {}
    for title, network in NETWORKS.items():
        for name, calls in ways(*network(), stacked=0 if network is smollm else ()).items():
            found[f"{title}, {name}: ms to trace"] = in_turns(calls, repeats)
    return found


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    heading(given)
    show(measure(given))
