"""How much memory does a gradient take under ``remat`` and ``factored``, and is it never more than without?

The rule: ``remat(f)`` takes no more temporaries than ``f``, ``remat(factored(f))`` no more than the smaller of the two
alone, and ``apply`` before a scan over layers no more than in its body. Here are the sizes that XLA plans, beside the
most that the rule allows. Nothing runs. This is done for this machine, and for a TPU where libtpu is installed, as in
``peak``. First, 16 scanned layers of 512, with and without an embedding of 8 MiB that is the output layer too, for 8
examples. Second, a language model of 30 scanned layers (``language``), for 2 x 64 words.

Run: python benchmarks/transforms.py [layers|language]
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from common import language
from common.timing import Rows, exact, heading, show
from jax.sharding import NamedSharding
from peak import KEY, MIB, compilers

import reparax as rpx

Step = tuple[Callable[..., jax.Array], tuple[Any, ...]]
"""A loss, and the shapes of its arguments; its first argument is what trains."""
LAYERS, WIDTH, WORDS, BATCH = 16, 512, 4096, 8
STACK = "layers/.*kernel"


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """A shape."""
    return jax.ShapeDtypeStruct(shape, dtype)


def of_chain(p: Any, loss: Callable[..., jax.Array], params: Any, data: Any) -> Step:
    """The loss of a chain that acts on the whole tree, before the network runs."""
    free, fixed = rpx.partition(jax.eval_shape(p.init, params, KEY))

    def of_free(free: Any, fixed: Any, key: jax.Array, data: Any) -> jax.Array:
        return loss(p.apply(rpx.combine(free, fixed), key), data)

    return of_free, (free, fixed, KEY, data)


def in_body(p: Any, loss: Callable[..., jax.Array], params: Any, data: Any) -> Step:
    """The loss of a chain that acts on one layer, in the body of the scan."""
    stacks = params["layers"]
    count = jax.tree.leaves(stacks)[0].shape[0]
    stacked = jax.eval_shape(jax.vmap(p.init), stacks, jax.eval_shape(lambda key: jax.random.split(key, count), KEY))
    free, fixed = rpx.partition({**params, "layers": stacked})

    def of_free(free: Any, fixed: Any, key: jax.Array, data: Any) -> jax.Array:
        raw = rpx.combine(free, fixed)
        layers = raw["layers"], jax.random.split(key, count)
        return loss({**raw, "layers": layers}, data, lambda layer: p.apply(*layer))

    return of_free, (free, fixed, KEY, data)


def dense(w: Any, words: jax.Array, of_step: Any = lambda layer: layer) -> jax.Array:
    """Scanned dense layers, with an embedding that is the output layer too if there is one."""
    x = w["embed"][words] if "embed" in w else jnp.ones((1, WIDTH)) * words[:, None].astype(jnp.float32)
    x, _ = jax.lax.scan(lambda x, own: (x + jnp.tanh(x @ of_step(own)["kernel"]), None), x, w["layers"])
    return jnp.mean(jnp.square(x @ w["embed"].T if "embed" in w else x))


def layers() -> Iterator[tuple[str, Step]]:
    """The losses of scanned dense layers."""
    stacks, words = {"layers": {"kernel": array(LAYERS, WIDTH, WIDTH)}}, array(BATCH, dtype=jnp.int32)
    chains = {
        "noise": rpx.VarNoise(0.01),
        "weight norm": rpx.WeightNorm(axis=-1, stacked=0, where=STACK),
        "LoRA": rpx.Freeze() >> rpx.LoRA(8, columns=-1, stacked=0, where=STACK),
    }
    bodies = {
        "noise": rpx.VarNoise(0.01),
        "weight norm": rpx.WeightNorm(axis=-1),
        "LoRA": rpx.Freeze() >> rpx.LoRA(8, columns=-1),
    }
    for where, params in {"tied": {"embed": array(WORDS, WIDTH), **stacks}, "no embedding": stacks}.items():
        yield f"{where}, no chain", (dense, (params, words))
        for name, p in chains.items():
            yield f"{where}, {name} before the scan", of_chain(p, dense, params, words)
    for name, p in bodies.items():
        yield f"no embedding, {name} in the body", in_body(p, dense, stacks, words)


def model() -> Iterator[tuple[str, Step]]:
    """The losses of a language model that is fine-tuned."""
    params, words = language.params(), array(2, 65, dtype=jnp.int32)
    yield "full fine-tuning", (language.loss, (params, words))
    frozen, lora = rpx.Freeze(where=".*"), rpx.LoRA(8, columns=-1, stacked=0, where=STACK)
    chains = {
        "LoRA": frozen >> lora,
        "DoRA": frozen >> lora >> rpx.WeightNorm(axis=-1, detach=True, stacked=0, where=STACK),
        "QLoRA": rpx.Freeze(where=rpx.all_but(STACK))
        >> rpx.Quantized("nf4", block_size=64, stacked=0, where=STACK)
        >> lora,
        "noise": rpx.VarNoise(0.01),
    }
    for name, p in chains.items():
        yield name, of_chain(p, language.loss, params, words)
    yield "noise in the body", in_body(rpx.VarNoise(0.01), language.loss, params, words)


def checkpointed() -> Iterator[tuple[str, Step]]:
    """``jax.checkpoint`` around a layer, in the body of the scan: of the plain network, of noise, and of LoRA."""
    params, words = language.params(), array(2, 65, dtype=jnp.int32)
    kernels, p = params["layers"], rpx.VarNoise(0.01)

    def of_layers(w: Any, data: Any) -> jax.Array:
        return language.loss(w, data, step=jax.checkpoint(language.layer))

    def noisy(made: Callable[..., Any], w: Any, key: jax.Array, data: Any) -> jax.Array:
        def step(own: Any, x: jax.Array) -> jax.Array:
            return language.layer(made(*own), x)

        layers = w["layers"], jax.random.split(key, language.LAYERS)
        return language.loss({**w, "layers": layers}, data, step=jax.checkpoint(step))

    def written(w: Any, key: jax.Array) -> Any:
        leaves, treedef = jax.tree.flatten(w)
        keys = jax.random.split(key, len(leaves))
        return treedef.unflatten([x + 0.01 * jax.random.normal(keys[i], x.shape) for i, x in enumerate(leaves)])

    def with_lora(ab: Any, w: Any, data: Any) -> jax.Array:
        def step(own: Any, x: jax.Array) -> jax.Array:
            own, ab = own
            made = {name: {"kernel": own[name]["kernel"] + a @ b} for name, (a, b) in ab.items()}
            return language.layer({**own, **made}, x)

        return language.loss({**w, "layers": (w["layers"], ab)}, data, step=jax.checkpoint(step))

    shapes = {name: kernels[name]["kernel"].shape for name in language.KERNELS}
    ab = {name: (array(n, rows, 8), array(n, 8, columns)) for name, (n, rows, columns) in shapes.items()}
    yield "no chain, jax.checkpoint", (of_layers, (params, words))
    yield "noise, jax.checkpoint", (functools.partial(noisy, p.apply), (params, KEY, words))
    yield "noise by hand, jax.checkpoint", (functools.partial(noisy, written), (params, KEY, words))
    yield "LoRA by hand, jax.checkpoint", (with_lora, (ab, params, words))


def temporary(step: Step, sharding: NamedSharding | None) -> float:
    """MiB of temporary memory of a gradient."""
    loss, given = step
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), given)
    memory: Any = jax.jit(jax.grad(loss)).lower(*placed).compile().memory_analysis()
    return memory.temp_size_in_bytes / MIB


def ways(step: Step, sharding: NamedSharding | None, *, in_factors: bool) -> Rows:
    """Each way, and the most that the rule allows of the last one."""
    loss, given = step
    found = {"apply": temporary(step, sharding), "remat": temporary((rpx.remat(loss), given), sharding)}
    if in_factors:
        found["factored"] = temporary((rpx.factored(loss), given), sharding)
        found["remat(factored)"] = temporary((rpx.remat(rpx.factored(loss)), given), sharding)
        found["rule for remat(factored)"] = min(found["remat"], found["factored"])
    found["rule for remat"] = found["apply"]
    return exact(found)


def measure(repeats: int, only: str | None = None) -> dict[str, Rows]:
    """All tables."""
    del repeats  # as a compiler gives the same program each time
    heading(1)
    results: dict[str, Rows] = {}
    for where, sharding in compilers().items():
        for group, cases in {"layers": layers, "language": model}.items():
            for name, step in cases() if only in (None, group) else ():
                own = ways(step, sharding, in_factors=any(each in name for each in ("LoRA", "DoRA")))
                results[title := f"{group}, {name}, {where}: temporary MiB"] = own
                show({title: own})
        for name, step in checkpointed() if only in (None, "language") else ():
            way = "by hand" if "by hand" in name else "jax.checkpoint"
            results[title := f"language, {name}, {where}: temporary MiB"] = exact({way: temporary(step, sharding)})
            show({title: results[title]})
    return results


if __name__ == "__main__":
    measure(1, sys.argv[1] if len(sys.argv) > 1 else None)
