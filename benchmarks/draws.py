"""What do noise and masks cost: each weight read and written once, and what besides?

First, ``VarNoise`` and ``WeightDropout`` against ``jax.random`` called by hand, on 6.3 million float32 weights: the
random words alone, noise, masks, and masks of 16 bits a weight, of which one count of Threefry gives four. Second, the
time to trace and to compile noise on many arrays of ten shapes, and a step of it. All run in one process and in
shuffled order, so that ratios are of one machine and hour.

Run: python benchmarks/draws.py [repeats [arrays ...]]
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from common.timing import Rows, heading, rows, show, shuffled

import reparax as rpx
from reparax.numerics import threefry

SHAPE = (6, 1024, 1024)
STD, KEEP = 0.075, 0.9
Way = Callable[[jax.Array, Any], Any]


def short_masks(key: jax.Array, w: jax.Array) -> jax.Array:
    """Dropout by 16 bits a weight."""
    words = jax.random.key_data(key)
    count = jax.lax.iota(jnp.uint32, w.size // 4)
    pairs = jnp.stack(threefry.cipher((words[0], words[1]), (jnp.uint32(0), count)))
    drawn = jax.lax.bitcast_convert_type(pairs, jnp.uint16).reshape(w.shape)
    return jnp.where(drawn < jnp.uint16(KEEP * 2**16), w / KEEP, 0)


STEPS: dict[str, dict[str, Way]] = {
    "the weights read and written": {"w * 2": lambda key, w: w * 2},
    "random words": {
        "jax.random.bits": lambda key, w: jax.random.bits(key, w.shape),
        "written out": lambda key, w: threefry.bits(key, w.shape, 32, jax.typeof(w).sharding),
    },
    "noise": {
        "jax.random.normal": lambda key, w: w + STD * jax.random.normal(key, w.shape),
        "VarNoise": lambda key, w: rpx.VarNoise(STD).apply({"w": w}, key)["w"],
    },
    "masks": {
        "jax.random.bernoulli": lambda key, w: jnp.where(jax.random.bernoulli(key, KEEP, w.shape), w / KEEP, 0),
        "WeightDropout": lambda key, w: rpx.WeightDropout(1 - KEEP).apply({"w": w}, key)["w"],
        "16 bits a weight": short_masks,
    },
}


def jax_by_hand(key: jax.Array, tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Noise by ``jax.random``, with a key for each array."""
    keys = jax.random.split(key, len(tree))
    return {name: w + STD * jax.random.normal(keys[i], w.shape) for i, (name, w) in enumerate(tree.items())}


BUILDS: dict[str, Way] = {
    "jax.random.normal": jax_by_hand,
    "VarNoise": lambda key, tree: rpx.VarNoise(STD).apply(tree, key),
}


def stepped(way: Way, key: jax.Array, w: Any) -> Callable[[], Any]:
    """A call that runs ``way``, compiled, and waits for it."""
    compiled = jax.jit(way).lower(key, w).compile()
    return lambda: jax.block_until_ready(compiled(key, w))


def built(way: Way, key: jax.Array, tree: dict[str, jax.Array]) -> Callable[[], Any]:
    """A call that traces and compiles ``way`` anew."""

    def call() -> Any:
        jax.clear_caches()
        return jax.jit(way).lower(key, tree).compile()

    return call


def measure(repeats: int, counts: Sequence[int] = (100, 1000)) -> dict[str, Rows]:
    """All tables, by title."""
    key, w = jax.random.key(0), jnp.ones(SHAPE)
    calls = {(what, name): stepped(way, key, w) for what, ways in STEPS.items() for name, way in ways.items()}
    times = shuffled({f"{what}/{name}": call for (what, name), call in calls.items()}, repeats)
    found = {what: rows({name: times[f"{what}/{name}"] for name in ways}) for what, ways in STEPS.items()}
    for count in counts:
        tree = {f"layer{i}": jnp.ones((64, 32 + 8 * (i % 10))) for i in range(count)}
        title = f"noise on {count} arrays of ten shapes"
        builds = {name: built(way, key, tree) for name, way in BUILDS.items()}
        found[f"{title}, traced and compiled"] = rows(shuffled(builds, max(1, min(3, 300 // count))))
        steps = {name: stepped(way, key, tree) for name, way in BUILDS.items()}
        found[f"{title}, a step"] = rows(shuffled(steps, repeats))
    return found


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    heading(given[0] if given else 15)
    show(measure(given[0] if given else 15, given[1:] or (100, 1000)))
