"""What takes long, measured once: the numbers are on file in ``results``; run: python -m examples.smollm.cells [table].

A run that was cut off goes on where it stopped. Tables: memory, rounding, tuning.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from rich.console import Console
from tokenizers import Tokenizer

import reparax as rpx
from benchmarks.evidence.record import Cell, Size, found, runs
from examples.smollm import by_hand, files, model, texts, tuning
from examples.smollm.model import Config, Params
from examples.smollm.report import BY_HAND, FULL, RESULTS, UNTUNED, best_rates

STEPS, LENGTH, TURNS = 20, 65, 16
WAYS: dict[str, rpx.Parametrization] = {
    FULL: tuning.FULL,
    **{f"LoRA {rank}": tuning.lora(rank) for rank in (8, 1, 4, 16, 64)},
    "DoRA 8": tuning.dora(8),
    "QLoRA 8": tuning.qlora(8),
    "gains": tuning.gains(),
}
RATES = dict.fromkeys(WAYS, (0.003, 0.01, 0.03)) | {
    FULL: (1e-4, 3e-4, 1e-3),
    "LoRA 64": (1e-3, 3e-3, 1e-2),
    "gains": (0.01, 0.03, 0.1),
}
ROUNDED: dict[str, rpx.Parametrization] = {
    "as downloaded": rpx.Chain(),
    "int8": rpx.Quantized("int8", axis=-1, stacked=0),
    "float8_e4m3fn": rpx.Quantized("float8_e4m3fn", axis=-1, stacked=0),
    "nf4, blocks of 64": rpx.Quantized("nf4", block_size=64, stacked=0),
    "int4, blocks of 32": rpx.Quantized("int4", block_size=32, stacked=0),
    "int4, blocks of 64": rpx.Quantized("int4", block_size=64, stacked=0),
    "20 % pruned": rpx.MagnitudePruning(0.2, stacked=0),
    "50 % pruned": rpx.MagnitudePruning(0.5, stacked=0),
}
NOISE = rpx.VarNoise(0.01, stacked=0, where="layers/.*/kernel")


@functools.cache
def loaded() -> tuple[Params, Tokenizer, Config]:
    """The model."""
    reader = files.Reader(files.fetch())
    return reader.params(), reader.tokenizer(), reader.config


def losses(params: Params) -> dict[str, float]:
    """What is lost on the new text and on the old one."""
    _, tokenizer, config = loaded()
    rows = {"new": "new, held out", "old": "prose"}
    return {
        what: tuning.held_out(params, texts.windows(name, tokenizer, LENGTH), config) for what, name in rows.items()
    }


def tuned(name: str, rate: float, seed: int) -> dict[str, Any]:
    """One run: losses, the curve, and what it costs."""
    params, tokenizer, config = loaded()
    p, windows = WAYS[name], texts.windows("new", tokenizer, LENGTH)
    run = tuning.fit(p, p.init(params, jax.random.key(seed)), windows, config, steps=STEPS, rate=rate, seed=seed)
    curve, seconds, raws = zip(*run, strict=True)
    raw = raws[-1]
    trained = sum(x.size for x in jax.tree.leaves(rpx.partition(raw)[0]))
    costs = {"trained": trained, "seconds a step": statistics.median(seconds)}
    return {**losses(jax.jit(p.fold)(raw)), **costs, "curve": curve}


def once(run: Callable[[], Mapping[str, Any]]) -> Cell:
    """A cell of one run, which has its seed in its name."""
    return lambda keys: {name: jnp.asarray([value]) for name, value in run().items()}


def tuning_cells() -> dict[str, Cell]:
    """Three rates for each way; and two more seeds at the rate that is best, once all three are on file."""
    made = {UNTUNED: once(lambda: losses(loaded()[0])), BY_HAND: once(hand_gap)}
    for name, rates in RATES.items():
        for rate in rates:
            made[f"{name}, rate {rate}, seed 0"] = once(functools.partial(tuned, name, rate, 0))
    on_file = found("tuning", RESULTS)
    for name, rate in best_rates(on_file).items():
        if all(f"{name}, rate {each}, seed 0" in on_file for each in RATES[name]):
            for seed in (1, 2):
                made[f"{name}, rate {rate}, seed {seed}"] = once(functools.partial(tuned, name, rate, seed))
    return made


def hand_gap() -> dict[str, Any]:
    """Losses and seconds of LoRA and of the same by hand, turn by turn, from the same start on the same windows."""
    params, tokenizer, config = loaded()
    p, windows, rate = WAYS["LoRA 8"], texts.windows("new", tokenizer, LENGTH), 3e-3
    raw = p.init(params, jax.random.key(0))
    factors = jax.tree.map(jnp.copy, by_hand.factors(raw))
    drawn, ours, theirs = np.random.default_rng(0), list[tuple[float, float]](), list[tuple[float, float]]()
    tx = optax.adam(lambda i: rate * 0.5 * (1 + jnp.cos(jnp.pi * i / TURNS)))
    state = tx.init(factors)

    @jax.jit
    def step(factors: Any, state: Any, params: Params, rows: Array) -> tuple[Any, Any, Array]:
        value, grads = jax.value_and_grad(lambda ab: model.loss(by_hand.adapted(params, ab), rows, config))(factors)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(factors, updates), state, value

    for value, seconds, _ in tuning.fit(p, raw, windows, config, steps=TURNS, rate=rate, seed=0):
        rows, begin = jnp.asarray(windows[drawn.integers(len(windows), size=2)]), time.perf_counter()
        factors, state, found = step(factors, state, params, rows)
        ours.append((value, seconds))
        theirs.append((float(found), time.perf_counter() - begin))
    return {"ours": ours, "by hand": theirs}


def rounded(p: rpx.Parametrization) -> dict[str, Any]:
    """The losses of weights that went through ``p``, and the bytes of those that are stored."""
    raw = p.init(loaded()[0])
    size = sum(x.nbytes for x in jax.tree.leaves(raw["layers"]))
    return {**losses(jax.jit(p.fold)(raw)), "bytes": size}


def memory_cells() -> dict[str, Cell]:
    """The temporary memory of a gradient of 2 x 64 tokens, as XLA plans it, which needs no weights."""
    lora = tuning.lora(8)
    made = {
        FULL: gradient(tuning.FULL),
        "LoRA 8, apply": gradient(lora),
        "LoRA 8, factored": gradient(lora, rpx.factored),
        "LoRA 8, by hand": lambda: planned(adapted_by_hand, by_hand.factors(typed(lora)), typed(), ROWS),
        "LoRA 8, remat(factored)": gradient(lora, both),
        "LoRA 64, factored": gradient(tuning.lora(64), rpx.factored),
        "DoRA 8, factored": gradient(tuning.dora(8), rpx.factored),
        "QLoRA 8, factored": gradient(tuning.qlora(8), rpx.factored),
        "gains, factored": gradient(tuning.gains(), rpx.factored),
        "DoRA 8, remat(factored)": gradient(tuning.dora(8), both),
        "QLoRA 8, remat(factored)": gradient(tuning.qlora(8), both),
        "QLoRA 8, remat, in the scan": in_scan(tuning.qlora),
        "noise, apply": gradient(NOISE),
        "noise, remat": gradient(NOISE, rpx.remat),
        "noise, by hand": lambda: planned(noisy_by_hand, typed(), KEY, ROWS),
    }
    return {name: once(run) for name, run in made.items()}


KEY = jax.eval_shape(jax.random.key, 0)
ROWS = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)


def typed(p: rpx.Parametrization = tuning.FULL) -> Any:
    """The types of a raw tree of the model."""
    shapes = model.shapes(Config())
    like = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.eval_shape(p.init, like, KEY)


def gradient(p: rpx.Parametrization, transform: Callable[[Any], Any] = lambda fun: fun) -> Callable[[], Any]:
    """What plans the gradient of the transformed loss."""

    def fun(free: Any, fixed: Any, key: Array, rows: Array) -> Array:
        return model.loss(p.apply(rpx.combine(free, fixed), key), rows, Config())

    return lambda: planned(transform(fun), *rpx.partition(typed(p)), KEY, ROWS)


def both(fun: Any) -> Any:
    """``fun`` that stores no weights and forms none where it can multiply by factors."""
    return rpx.remat(rpx.factored(fun))


def in_scan(chain: Callable[..., rpx.Parametrization]) -> Callable[[], Any]:
    """What plans the gradient where the weights of a layer are computed in the body of the scan."""
    loss = tuning.loss_in_scan(chain(8, stacked=()), Config())
    return lambda: planned(loss, *rpx.partition(typed(chain(8))), ROWS)


def adapted_by_hand(factors: Any, params: Params, rows: Array) -> Array:
    """The loss of adapters that somebody wrote."""
    return model.loss(by_hand.adapted(params, factors), rows, Config())


def noisy_by_hand(params: Params, key: Array, rows: Array) -> Array:
    """The loss of noise that somebody wrote."""
    return model.loss(by_hand.noisy(params, 0.01, key), rows, Config())


def planned(fun: Any, *args: Any) -> dict[str, Any]:
    """The temporary bytes of the gradient with respect to the first argument, and its operations."""
    compiled = jax.jit(jax.grad(fun)).lower(*args).compile()
    memory: Any = compiled.memory_analysis()
    return {"temporary": memory.temp_size_in_bytes, "operations": compiled.cost_analysis()["flops"]}


TABLES: dict[str, Callable[[], dict[str, Cell]]] = {
    "memory": memory_cells,
    "rounding": lambda: {name: once(functools.partial(rounded, p)) for name, p in ROUNDED.items()},
    "tuning": tuning_cells,
}


def main() -> None:
    """Runs what is not on file."""
    parser = argparse.ArgumentParser(prog="python -m examples.smollm.cells", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"of {', '.join(TABLES)}")
    console = Console()
    RESULTS.mkdir(exist_ok=True)
    asked = parser.parse_args().tables or TABLES
    for _ in range(2):  # the second time for cells that depend on the first ones
        for name in asked:
            for cell, took in runs(name, TABLES[name](), Size(seeds=1), RESULTS):
                console.print(f"{name}: {cell} ({took:.0f} s)", highlight=False)


if __name__ == "__main__":
    main()
