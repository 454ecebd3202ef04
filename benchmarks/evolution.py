"""What does the estimate of evolution strategies cost, against a loop over members and against evosax?

Operations and temporary bytes are XLA's. By hand means a loop that forms the noise of each member as a matrix. evosax
takes the whole population as one array: of 1024 members, only its operations and bytes are counted.

Run: python benchmarks/evolution.py [repeats [width]]
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common.timing import Rows, exact, heading, rows, show, shuffled

import reparax as rpx

STD, WIDTH, MIB, GIGA = 0.05, 1024, 2**20, 1e9
KEY = jax.random.key(0)
STORED = 128
"""The largest population of evosax that runs here."""


def by_hand(rank: int | None) -> Callable[[Any, jax.Array, jax.Array], Any]:
    """A loop over members, whose noise is a matrix."""
    unit = rpx.VarNoise(1.0, rank=rank)

    def estimate(raw: Any, keys: jax.Array, fitness: jax.Array) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, raw)

        def add(total: Any, member: Any) -> Any:
            key, f = member
            return jax.tree.map(lambda t, e: t + f * e, total, unit.apply(zeros, key)), None

        total, _ = jax.lax.scan(add, zeros, (keys, fitness))
        return jax.tree.map(lambda t: t / (len(keys) * STD), total)

    return estimate


def by_evosax(members: int, raw: Any) -> Callable[[Any, jax.Array, jax.Array], Any] | None:
    """One step of OpenAI-ES over a stored population; None where evosax is not installed."""
    try:
        algorithms, optax = importlib.import_module("evosax.algorithms"), importlib.import_module("optax")
    except ImportError:
        return None
    like = jax.tree.map(lambda x: jnp.zeros(x.shape), raw)
    es = algorithms.Open_ES(
        members,
        like,
        optimizer=optax.sgd(1.0),
        std_schedule=optax.constant_schedule(STD),
        fitness_shaping_fn=lambda population, fitness, state, params: fitness,
    )
    state = es.init(KEY, like, es.default_params)

    def told(raw: Any, population: Any, fitness: jax.Array) -> Any:
        del raw
        return es.tell(KEY, population, fitness, state, es.default_params)[0].mean

    return told


def ways(rank: int | None, members: int, width: int) -> dict[str, tuple[Any, Any]]:
    """For each way the function and its arguments, of which a population is only described."""
    p, raw = rpx.VarNoise(STD, rank=rank), {"w": jax.ShapeDtypeStruct((width, width), jnp.float32)}

    def ours(chunk: int | None) -> Callable[[Any, jax.Array, jax.Array], Any]:
        return lambda raw, keys, fitness: rpx.noise.noise_gradient(p, raw, keys, fitness, chunk=chunk)

    args = raw, jax.eval_shape(lambda: jax.random.split(KEY, members)), jax.ShapeDtypeStruct((members,), jnp.float32)
    found = {"by hand": (by_hand(rank), args), "noise_gradient": (ours(None), args)}
    if rank is not None:
        found |= {f"noise_gradient, chunk={chunk}": (ours(chunk), args) for chunk in (1, 16, members)}
    theirs = by_evosax(members, raw)
    population = {"w": jax.ShapeDtypeStruct((members, width, width), jnp.float32)}
    return found | ({} if theirs is None else {"evosax, stored": (theirs, (raw, population, args[2]))})


def measure(repeats: int, width: int = WIDTH) -> dict[str, Rows]:
    """All tables, by title."""
    found: dict[str, Rows] = {}
    for rank in (1, 4, None):
        for members in (64, 1024) if rank else (64,):
            chosen = ways(rank, members, width)
            programs = {name: jax.jit(f).lower(*args).compile() for name, (f, args) in chosen.items()}
            title = f"estimate of {members} members, rank {rank or 'full'}, {width} x {width}"
            operations = {name: flops(c) * steps(*chosen[name]) / GIGA for name, c in programs.items()}
            found[f"{title}: GFLOP"] = exact(operations)
            temporary = {name: c.memory_analysis().temp_size_in_bytes / MIB for name, c in programs.items()}
            found[f"{title}: temporary MiB"] = exact(temporary)
            small = {name: c for name, c in programs.items() if "evosax" not in name or members <= STORED}
            given = {name: jax.tree.map(filled, chosen[name][1]) for name in small}
            calls = {name: lambda c=c, args=given[name]: jax.block_until_ready(c(*args)) for name, c in small.items()}
            shuffled(calls, 1)
            found[f"{title}: ms"] = rows(shuffled(calls, repeats))
    return found


def flops(program: Any) -> float:
    """The operations that XLA counts; of a loop, one step."""
    return program.cost_analysis()["flops"]


def steps(function: Callable[..., Any], args: Any) -> int:
    """How often the loop over members runs; 1 where there is none."""
    eqns = jax.make_jaxpr(function)(*args).eqns
    return max([eqn.params["length"] for eqn in eqns if eqn.primitive.name == "scan"], default=1)


def filled(like: Any) -> Any:
    """An array of this type."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.split(KEY, like.shape[0])
    return jnp.linspace(-1.0, 1.0, like.size).reshape(like.shape)


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    heading(given)
    show(measure(given, *map(int, sys.argv[2:])))
