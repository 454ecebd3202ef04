"""LoRA of a small rank reaches what full fine-tuning reaches, and DoRA is no worse.

Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*, 2021, arXiv 2106.09685; Liu et al., *DoRA:
Weight-Decomposed Low-Rank Adaptation*, 2024, arXiv 2402.09353. They speak of large models, and of tasks near to what
these have learned; here the model is small, and source code is far from the prose of the documentation.

Protocol:
An LSTM of 96 units learns characters of Python's documentation once, in 3000 steps; then it is tuned to source code.
Tuned in 300 steps to much code (350,000 characters) or little (10,000), all weights or adapters of rank 1 to 16.
Three learning rates, decaying to zero, the same for each way to tune; validation text chooses.
Five seeds of tuning, of one model; bits per character of held-out code that played no part in choosing
settings, against the trainable parameters.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure
from scipy import stats

import reparax as rpx
from benchmarks.evidence import char_lstm, data
from benchmarks.evidence.record import Cell, Found, Size
from benchmarks.evidence.summary import against, best, difference, markdown, told
from benchmarks.evidence.training import fit

UNTUNED, FULL, LORA, DORA = "untuned", "full", "LoRA", "DoRA"
RANKS = {LORA: (1, 2, 4, 8, 16), DORA: (1, 4, 16)}
RATES = {"little": (0.001, 0.003, 0.01), "much": (0.01, 0.03, 0.1)}
CHARACTERS = {"little": 10_000, "much": 350_000}
TITLES = {amount: f"{amount} code ({count:,} characters)" for amount, count in CHARACTERS.items()}
STYLES = {FULL: ("#000000", "--"), LORA: ("#B84F00", "^-"), DORA: ("#007A58", "D-.")}


def chains(size: Size) -> dict[str, rpx.Parametrization]:
    """The ways to tune, by name."""
    made: dict[str, rpx.Parametrization] = {FULL: rpx.Chain()}
    for method, ranks in RANKS.items():
        for rank in ranks[: size(len(ranks), 1)]:
            adapter = rpx.Freeze() >> rpx.LoRA(rank, columns=-1)
            made[f"{method} {rank}"] = adapter >> rpx.WeightNorm(axis=-1, detach=True) if method == DORA else adapter
    return made


def loss(weights: Any, rows: Array, key: Array) -> Array:
    """What is trained and measured: bits per character."""
    del key
    return char_lstm.bits(weights, rows)


@functools.cache
def pretrained(size: Size) -> Any:
    """The weights that all tuning starts from."""
    text = data.text()
    ids, steps = jnp.asarray(text.ids), size(3000, 4)

    @jax.jit
    def train(key: Array) -> Any:
        params = char_lstm.init(key, text.size, size(96, 16))
        optimizer = optax.adam(optax.cosine_decay_schedule(0.01, steps))
        return fit(rpx.Chain(), params, loss, windows(ids, size, len(ids)), optimizer, steps, key)[0]

    return train(jax.random.key(1))


def windows(ids: Array, size: Size, length: int | Array) -> Callable[[Array], Array]:
    """What draws a batch of the first ``length`` characters."""
    return lambda key: char_lstm.windows(ids, key, size(16, 2), size(50, 4), length)


def code() -> tuple[Array, Array]:
    """Source code to train on, in blocks of ten rows from all over it; and rows to choose by and to report."""
    ids = data.source().ids
    blocks = ids[: ids.size // 10_100 * 10_100].reshape(-1, 10, 1010)
    train = blocks[:, :8].reshape(-1, 1010)
    mixed = np.random.default_rng(0).permutation(train).reshape(-1)
    return jnp.asarray(mixed), jnp.asarray(blocks[:, 8:].swapaxes(0, 1).reshape(2, -1, 101))


def run(p: rpx.Parametrization, size: Size, key: Array, base: Any, rate: Array, length: Array) -> dict[str, Array]:
    """One seed: tuned, and measured."""
    steps, (train, held_out) = size(300, 4), code()
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    raw, _, _ = fit(p, base, loss, windows(train, size, length), optimizer, steps, key)
    weights = p.fold(raw)
    of_valid, of_test = jax.lax.map(lambda rows: char_lstm.bits(weights, rows), held_out[:, :: size(2, 40)])
    trained = sum(w.size for w in jax.tree.leaves(rpx.partition(raw)[0]))
    return {"valid": of_valid, "test": of_test, "trained": jnp.float32(trained)}


def tuned(p: rpx.Parametrization, size: Size) -> Callable[[float, int], Cell]:
    """The cell of a learning rate and a number of characters."""
    all_seeds = jax.jit(jax.vmap(functools.partial(run, p, size), in_axes=(0, None, None, None)))
    return lambda rate, length: lambda keys: all_seeds(keys, pretrained(size), jnp.float32(rate), jnp.int32(length))


def untuned(size: Size, keys: Array) -> dict[str, Array]:
    """The bits per character that tuning starts from, the same for all seeds."""
    _, held_out = code()
    return {"test": jnp.broadcast_to(char_lstm.bits(pretrained(size), held_out[1, :: size(2, 40)]), len(keys))}


def cells(size: Size) -> dict[str, Cell]:
    """The model before tuning; and one for each way to tune, amount of code and learning rate."""
    made: dict[str, Cell] = {UNTUNED: functools.partial(untuned, size)}
    for name, p in chains(size).items():
        cell = tuned(p, size)
        for amount, rates in RATES.items():
            for rate in rates[: size(len(rates), 1)]:
                made[f"{amount}, {name}, rate {rate}"] = cell(rate, CHARACTERS[amount])
    return made


def chosen(found: Found, amount: str) -> dict[str, str]:
    """The cell of each way to tune that is best on validation text."""
    ways: dict[str, list[str]] = {}
    for name in found:
        if name.startswith(f"{amount}, "):
            ways.setdefault(name.split(", ")[1], []).append(name)
    return {way: best(found, names, "valid", least=True) for way, names in ways.items()}


def tested(found: Found, amount: str) -> dict[str, np.ndarray]:
    """What each way to tune reports, at its best rate."""
    return {way: found[name]["test"] for way, name in chosen(found, amount).items()}


def gain(found: Found, amount: str, way: str) -> str:
    """How much of what full fine-tuning gains a way to tune gains too."""
    tests, before = tested(found, amount), found[UNTUNED]["test"].mean()
    return f"{100 * (before - tests[way].mean()) / (before - tests[FULL].mean()):.0f} %"


def sizes(found: Found, amount: str) -> dict[str, int]:
    """The numbers that each way to tune trains."""
    return {way: int(found[name]["trained"][0]) for way, name in chosen(found, amount).items()}


def table(found: Found) -> str:
    """A row for each way to tune."""
    before = told(found[UNTUNED]["test"], 3).partition(" ")[0]
    head, rows = ["tuned", "numbers"], [["nothing", "0"]]
    rows += [[way, f"{size:,}"] for way, size in sizes(found, "little").items()]
    for amount in RATES:
        head += [f"{amount} code", "rate", "gain", "against full"]
        rows[0] += [before, "", "", ""]
        tests, names = tested(found, amount), chosen(found, amount)
        for row, (way, bits) in zip(rows[1:], tests.items(), strict=True):
            compared = "" if way == FULL else against(bits, tests[FULL], 3)
            row += [told(bits, 3), names[way].rpartition(" ")[2], gain(found, amount, way), compared]
    return markdown(head, rows)


def picture(found: Found) -> Figure:
    """Bits per character against the trainable parameters, for little and much code."""
    figure = Figure(figsize=(7.8, 3.8), layout="constrained")
    for axes, amount in zip(figure.subplots(1, 2), RATES, strict=True):
        tests, trained = tested(found, amount), sizes(found, amount)
        for method, (colour, style) in STYLES.items():
            ways = [way for way in tests if way.split(" ")[0] == method]
            means, errors = ([of(tests[way]) for way in ways] for of in (np.mean, stats.sem))
            if method == FULL:
                axes.axhspan(means[0] - errors[0], means[0] + errors[0], color=colour, alpha=0.15, linewidth=0)
                axes.axhline(means[0], ls=style, color=colour, label=f"all {trained[FULL]:,} weights")
                continue
            numbers = [trained[way] for way in ways]
            axes.errorbar(numbers, means, errors, fmt=style, color=colour, capsize=3, markersize=5, label=method)
            for number, mean, way in zip(numbers, means, ways, strict=True):
                above = 7 if method == LORA else -14
                axes.annotate(f"{rank(way)}", (number, mean), (0, above), textcoords="offset points", color=colour)
        axes.set(
            xscale="log",
            xlabel="trainable parameters (labels: rank)",
            ylabel="bits per character",
            title=TITLES[amount],
        )
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=9)
    return figure


def rank(way: str) -> int:
    """Of LoRA or DoRA."""
    return int(way.rpartition(" ")[2])


def verdict(found: Found) -> str:
    """Whether some rank of LoRA reaches full fine-tuning, and what DoRA gets, for little and much code."""
    return " ".join(_reached(found, amount) for amount in RATES)


def _reached(found: Found, amount: str) -> str:
    tests = tested(found, amount)
    loras = [way for way in tests if way.startswith(LORA)]
    best = min(loras, key=lambda way: tests[way].mean())
    reaches = difference(tests[best], tests[FULL]).word != "higher"
    dora = f"{DORA} {rank(best)}"
    beside = f" (DoRA {gain(found, amount, dora)})" if dora in tests else ""
    share = f"LoRA of rank {rank(best)} gets {gain(found, amount, best)} of full fine-tuning's gain{beside}"
    return f"With {amount} code, {'yes' if reaches else 'no'}: {share}."


def sentence(found: Found) -> str:
    """From which rank on LoRA reaches full fine-tuning, and whether DoRA is worse, for little and much code."""
    return " ".join(_of_amount(found, amount) for amount in RATES)


def _of_amount(found: Found, amount: str) -> str:
    tests, trained = tested(found, amount), sizes(found, amount)
    full, loras = tests[FULL], [way for way in tests if way.startswith(LORA)]
    rates = {way: name.rpartition(" ")[2] for way, name in chosen(found, amount).items()}
    reach = [way for way in loras if difference(tests[way], full).word != "higher"]
    nearest = reach[0] if reach else min(loras, key=lambda way: tests[way].mean())
    said = "the smallest rank of LoRA that reaches it is" if reach else "no rank of LoRA reaches it, the best is"
    share = f"{100 * trained[nearest] / trained[FULL]:.1f} % of the numbers"
    doras = [
        f"{against(tests[way], tests[lora], 3)} at rank {rank(way)}"
        for way in tests
        if way.startswith(DORA) and (lora := f"{LORA} {rank(way)}") in tests
    ]
    return (
        f"With {TITLES[amount]}, full fine-tuning (rate {rates[FULL]}) comes to {told(full, 3)} bits per character; "
        f"{said} {rank(nearest)} (rate {rates[nearest]}), with {share}, {gain(found, amount, nearest)} of the gain, "
        f"and {told(tests[nearest], 3)}: {against(tests[nearest], full, 3)}; DoRA against LoRA: {', '.join(doras)}."
    )
