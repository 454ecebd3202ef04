"""Evolution strategies with noise of low rank climb as high as with full noise, in a fraction of the memory.

Sarkar et al., *Evolution Strategies at the Hyperscale*, 2025 (arXiv 2511.16652).

Protocol:
Digits: 1000 images to train on, two hidden layers of 128 units, 32 mirrored pairs of networks in each generation.
Each is judged by its loss on 64 images; noise of full rank, of rank 4 and of rank 1, each of standard deviation 0.05.
Adam on the estimate, 300 generations, 3 rates for each kind of noise, chosen on 297 images; 5 seeds.
Measure: accuracy on 500 new images against networks judged.
Memory: temporary bytes of one compiled generation, for 128 to 2048 units; they are exact and have no spread.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure

import reparax as rpx
from benchmarks.evidence.data import Split, digits
from benchmarks.evidence.record import Cell, Found, Size
from benchmarks.evidence.summary import best, difference, markdown, told

PyTree = Any
Batch = tuple[Array, Array]

STD = 0.05
RATES = (0.003, 0.01, 0.03)
RANKS = {"full noise": None, "rank 4": 4, "rank 1": 1}
UNITS = (128, 512, 2048)
"""Those that train, and wider ones whose memory is asked for."""
PAIRS, ROWS, GENERATIONS, POINTS = 32, 64, 300, 30
MIB = 2**20


def network_params(key: Array, units: int) -> PyTree:
    """Of two hidden layers; the last layer starts small."""
    sizes = {"first": (64, units, 1.0), "second": (units, units, 1.0), "last": (units, 10, 0.1)}
    keys = jax.random.split(key, len(sizes))
    return {
        name: {"kernel": gain * jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, "bias": jnp.zeros(m)}
        for k, (name, (n, m, gain)) in zip(keys, sizes.items(), strict=True)
    }


def logits(weights: PyTree, x: Array) -> Array:
    """Of two hidden layers with ReLU."""
    for name in ("first", "second"):
        x = jax.nn.relu(x @ weights[name]["kernel"] + weights[name]["bias"][None])
    return x @ weights["last"]["kernel"] + weights["last"]["bias"][None]


def loss(weights: PyTree, batch: Batch) -> Array:
    """The mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(weights, batch[0]), batch[1]).mean()


def accuracy(weights: PyTree, batch: Batch) -> Array:
    """How many images of a hundred are read as what they show."""
    return 100 * (logits(weights, batch[0]).argmax(-1) == batch[1]).mean()


class Way(NamedTuple):
    """How a population is judged.

    Attributes:
      rank: Of the noise, None for full noise.
      at_once: Whether all members are judged side by side, or one after the other.
      in_factors: Whether noisy weights are never formed.
    """

    rank: int | None
    at_once: bool
    in_factors: bool


AT_ONCE, IN_FACTORS = "full noise, all members at once", "rank 1, in factors, all members at once"
WAYS = {
    AT_ONCE: Way(None, at_once=True, in_factors=False),
    "full noise, one member at a time": Way(None, at_once=False, in_factors=False),
    "rank 1, weights formed, all members at once": Way(1, at_once=True, in_factors=False),
    "rank 4, in factors, all members at once": Way(4, at_once=True, in_factors=True),
    IN_FACTORS: Way(1, at_once=True, in_factors=True),
}
"""Those whose memory is compared."""


def generation(way: Way, weights: PyTree, keys: Array, batch: Batch) -> PyTree:
    """The estimate that one population gives, a pair of mirrored members for each key."""

    def score(weights: PyTree, key: Array, std: Array, batch: Batch) -> Array:
        return loss(rpx.VarNoise(std, rank=way.rank).apply(weights, key), batch)

    judged = rpx.factored(score, argnums=(0, 1, 2)) if way.in_factors else score
    over = jax.vmap if way.at_once else lambda f: lambda keys: jax.lax.map(f, keys)
    up, down = jax.lax.map(lambda std: over(lambda key: judged(weights, key, std, batch))(keys), jnp.array([STD, -STD]))
    return rpx.noise.noise_gradient(rpx.VarNoise(STD, rank=way.rank), weights, keys, (up - down) / 2)


def climb(way: Way, units: int, generations: int, points: int, data: Split) -> Callable[[float], Cell]:
    """For each rate a cell that trains without gradients: the accuracy on new images, and on those to choose by."""

    def run(key: Array, rate: Array) -> dict[str, Array]:
        tx = optax.adam(rate)

        def step(carry: tuple[PyTree, PyTree], key: Array) -> tuple[tuple[PyTree, PyTree], None]:
            weights, state = carry
            of_rows, of_noise = jax.random.split(key)
            rows = jax.random.choice(of_rows, len(data.train[0]), (ROWS,))
            batch = data.train[0][rows], data.train[1][rows]
            estimate = generation(way, weights, jax.random.split(of_noise, PAIRS), batch)
            with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
                updates, state = tx.update(estimate, state)
            return (optax.apply_updates(weights, updates), state), None

        def stretch(carry: tuple[PyTree, PyTree], keys: Array) -> tuple[tuple[PyTree, PyTree], Array]:
            carry, _ = jax.lax.scan(step, carry, keys)
            return carry, accuracy(carry[0], data.test)

        key_init, key_steps = jax.random.split(key)
        weights = network_params(key_init, units)
        keys = jax.random.split(key_steps, (points, generations // points))
        (weights, _), test = jax.lax.scan(stretch, (weights, tx.init(weights)), keys)
        judged = 2 * PAIRS * (generations // points) * jnp.arange(1, points + 1)
        return {"judged": judged, "test": test, "valid": accuracy(weights, data.valid)}

    seed_by_seed = jax.jit(lambda keys, rate: jax.lax.map(lambda key: run(key, rate), keys))
    return lambda rate: lambda keys: seed_by_seed(keys, jnp.float32(rate))


def memory(way: Way, widths: tuple[int, ...]) -> Cell:
    """MiB of temporaries of a compiled generation for each number of units; nothing runs, so all seeds are alike."""

    def temporaries(units: int) -> float:
        weights = jax.eval_shape(lambda: network_params(jax.random.key(0), units))
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), PAIRS))
        batch = jax.ShapeDtypeStruct((ROWS, 64), jnp.float32), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
        compiled = jax.jit(lambda *given: generation(way, *given)).lower(weights, keys, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes / MIB

    def of_seeds(keys: Array) -> dict[str, Array]:
        table = {"units": list(map(float, widths)), "mib": [temporaries(units) for units in widths]}
        return {name: jnp.tile(jnp.array(row)[None], (len(keys), 1)) for name, row in table.items()}

    return of_seeds


def cells(size: Size) -> dict[str, Cell]:
    """Each kind of noise at each rate, and the memory of each way; at tiny size one rate and two ways."""
    data, widths = digits(), (16,) if size.tiny else UNITS
    ranks = {name: rank for name, rank in RANKS.items() if rank != 4 or not size.tiny}
    ways = {name: way for name, way in WAYS.items() if not size.tiny or way in (WAYS[AT_ONCE], WAYS[IN_FACTORS])}
    climbs: dict[str, Cell] = {}
    for name, rank in ranks.items():
        # The numbers do not depend on whether members are judged side by side, but the time does.
        way = Way(rank, at_once=rank is not None, in_factors=rank is not None)
        with_rate = climb(way, widths[0], size(GENERATIONS, 2), size(POINTS, 2), data)
        climbs |= {f"{name}, rate {rate:g}": with_rate(rate) for rate in RATES[size(0, 2) :]}
    return climbs | {f"memory: {name}": memory(way, widths) for name, way in ways.items()}


def chosen(found: Found) -> dict[str, str]:
    """For each kind of noise the cell of its best rate."""
    kinds = dict.fromkeys(name.split(", rate ")[0] for name in found if ", rate " in name)
    return {kind: best(found, [name for name in found if name.startswith(f"{kind}, rate")], "valid") for kind in kinds}


def measured(found: Found) -> dict[str, dict[int, float]]:
    """For each way the MiB by units."""
    ways = {name.removeprefix("memory: "): of for name, of in found.items() if name.startswith("memory: ")}
    return {
        name: dict(zip(of["units"][0].astype(int).tolist(), of["mib"][0].tolist(), strict=True))
        for name, of in ways.items()
    }


def table(found: Found) -> str:
    """For each way the accuracy of its noise, which does not depend on the way, and bytes."""
    names, rows = chosen(found), []
    for way, of in measured(found).items():
        name = names[way.partition(", ")[0]]
        rate = name.rpartition(" ")[2]
        rows.append([way, rate, told(found[name]["test"][:, -1]), *map(_mib, of.values())])
    head = ["noise, and how a generation is judged", "best rate", "accuracy on new images in percent"]
    return markdown([*head, *(f"MiB at {units} units" for units in of)], rows)


def _mib(size: float) -> str:
    return f"{size:,.0f}" if size >= 100 else f"{size:.3g}"


STYLES = {"full noise": ("#000000", "o-"), "rank 4": ("#007A58", "D-."), "rank 1": ("#B84F00", "^-")}


def picture(found: Found) -> Figure:
    """Accuracy against networks judged, and memory against width."""
    figure = Figure(figsize=(7.8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind, name in chosen(found).items():
        colour, style = STYLES[kind]
        judged, test = found[name]["judged"][0] / 1000, found[name]["test"]
        mean, error = test.mean(0), test.std(0, ddof=1) / len(test) ** 0.5
        left.plot(judged, mean, style, color=colour, label=name, markersize=4, markevery=max(1, len(judged) // 8))
        left.fill_between(judged, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
    left.set(xlabel="thousands of networks judged", ylabel="accuracy on new images in percent")
    for name, of in measured(found).items():
        colour, style = STYLES[name.split(", ")[0]]
        dotted = "formed" in name or "one member" in name
        right.plot(list(of), list(of.values()), style[0] + (":" if dotted else "-"), color=colour, label=name)
    right.set(xlabel="units of each hidden layer", ylabel="MiB of a generation", xscale="log", yscale="log")
    right.set_xticks(list(of), [str(units) for units in of])
    right.minorticks_off()
    right.set_ylim(top=right.get_ylim()[1] * 100)  # room for the legend
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    return figure


def verdict(found: Found) -> str:
    """Whether noise of low rank climbs lower, and what it takes."""
    names, sizes = chosen(found), measured(found)
    units, full = max(sizes[AT_ONCE]), found[names["full noise"]]["test"][:, -1]
    lower = [kind for kind in names if difference(found[names[kind]]["test"][:, -1], full).word == "lower"]
    same = [kind for kind in names if kind not in (*lower, "full noise")]
    parts = [f"{kind} climbs lower than full noise" for kind in lower]
    parts += [f"{kind} climbs not significantly lower" for kind in same]
    least = min(of[units] for of in sizes.values())
    return (
        f"{'; '.join(parts).capitalize()}. The least memory of a generation, {_mib(least)} MiB of "
        f"{_mib(sizes[AT_ONCE][units])}, is that of {min(sizes, key=lambda way: sizes[way][units])}."
    )


def sentence(found: Found) -> str:
    """How high each climbs, and what a generation takes."""
    names = chosen(found)
    full = found[names["full noise"]]["test"][:, -1]
    others = [_against(name, found[name]["test"][:, -1], full) for kind, name in names.items() if kind != "full noise"]
    judged = found[names["full noise"]]["judged"][0, -1]
    climbs = f"{names['full noise']}, reads {told(full)} % of new images; {'; '.join(others)}"
    return f"After {judged:.0f} networks judged, {climbs}. {_memory(measured(found))}"


def _against(name: str, values: np.ndarray, full: np.ndarray) -> str:
    gap = difference(values, full)
    return f"{name}, {told(values)} % ({gap.mean:+.1f} ± {gap.error:.1f} points, p = {gap.p:.2g}: {gap.word})"


def _memory(sizes: dict[str, dict[int, float]]) -> str:
    units = max(sizes[AT_ONCE])
    full = sizes[AT_ONCE][units]
    others = [
        f"{_mib(of[units])} MiB ({of[units] / full:.1%}) with {name}" for name, of in sizes.items() if name != AT_ONCE
    ]
    return f"With {units} units a generation takes {_mib(full)} MiB with {AT_ONCE}; {'; '.join(others)}."
