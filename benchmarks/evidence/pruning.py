"""Pruning on a schedule beats pruning at the end, and dynamic sparse training is between.

Zhu and Gupta, *To prune, or not to prune: exploring the efficacy of pruning for model compression*, 2017, arXiv
1710.01878; Evci, Gale, Menick, Castro and Elsen, *Rigging the Lottery: Making All Tickets Winners*, 2020, arXiv
1911.11134; Mocanu and others, *Scalable training of artificial neural networks with adaptive sparse connectivity
inspired by network science*, 2018, arXiv 1707.04780.

What was tried: a first run chose settings by the mean with 99 % in it. There the schedule and pruning at the end were
not significantly different, as the latter spreads widely over the seeds.

Protocol:
Data: 1000 digits. An MLP (64-100-100-10), both hidden kernels pruned; Adam at 0.003, batches of 50, 1500 steps for all.
At the end: once, and 50, 25 or 10 % of the steps are left to tune. Schedule: cubic, done when as many steps are left.
SET, RigL: sparse from the start; masks move every 25 steps until 75 % of all, and drop 10, 30 or 50 % at first.
So each method has 3 settings; one is chosen by the mean validation accuracy at 80 to 98 % of zeros. 5 seeds.
Measure: test accuracy in percent, and its mean at 80 to 98 %, the range of the plan; 99 % shows where it breaks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from scipy import stats

import reparax as rpx
from benchmarks.evidence.data import digits
from benchmarks.evidence.digit_nets import accuracy, error, minibatch, mlp
from benchmarks.evidence.record import Cell, Found, Size, over_settings
from benchmarks.evidence.summary import NONE, difference, markdown, told

Carry = tuple[Any, Any]
"""A raw tree, and the state of its optimizer."""

SPARSITIES = (0.8, 0.9, 0.95, 0.98, 0.99)
MOST = 0.98
"""Of the sparsities that settings are chosen by, and that the mean is taken of."""
LEFT, DROPS = (0.5, 0.25, 0.1), (0.1, 0.3, 0.5)
SETTINGS = {"schedule": LEFT, "at the end": LEFT, "RigL": DROPS, "SET": DROPS}
"""What each method has tried."""
STYLES = {
    "schedule": ("#B84F00", "^-"),
    "at the end": ("#0072B2", "s--"),
    "RigL": ("#007A58", "D-."),
    "SET": ("#A34F80", "v:"),
}
TICKS = (1, 2, 5, 10, 20, 40)
"""Of the errors in the picture, in percent."""
DENSE = "dense"
PRUNED = "hidden.*/kernel"
ROUNDS, STEPS = 60, 25
"""How many rounds there are, and how many steps in each before the masks move."""


def cells(size: Size) -> dict[str, Cell]:
    """One for each method, setting and sparsity, and the network without zeros."""
    rounds = size(ROUNDS, 4)
    trained = {method: over_settings(training(method, size)) for method in ("schedule", "RigL", "SET")}
    trained["at the end"] = trained["schedule"]  # another plan for the same program
    found = {DENSE: trained["at the end"](0.0, *planned("at the end", 0.0, LEFT[0], rounds))}
    for method, settings in SETTINGS.items():
        for setting in settings[: size(len(settings), 1)]:
            for sparsity in SPARSITIES[: size(len(SPARSITIES), 2)]:
                plan = planned(method, sparsity, setting, rounds)
                found[named(method, setting, sparsity)] = trained[method](sparsity, *plan)
    return found


def named(method: str, setting: float, sparsity: float) -> str:
    """The name of a cell."""
    return f"{method}, {described(method, setting)}, sparsity {sparsity}"


def described(method: str, setting: float) -> str:
    """A setting in words."""
    return f"drop {listed([setting])}" if method in ("RigL", "SET") else f"{listed([setting])} of the steps left"


def planned(method: str, sparsity: float, setting: float, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """The sparsity that masks get after each round, or the share that they drop, and whether they move at all."""
    after = np.arange(1, rounds + 1)
    if method in ("RigL", "SET"):
        done = np.minimum(after / (0.75 * rounds), 1)
        return np.float32(setting * (1 + np.cos(np.pi * done)) / 2), done < 1
    end = round((1 - setting) * rounds)
    if method == "at the end":
        return np.full(rounds, sparsity, np.float32), after == end
    return np.float32(sparsity * (1 - (1 - np.minimum(after / end, 1)) ** 3)), after <= end


def stage(method: str, sparsity: Array, planned: Array | float) -> rpx.Parametrization:
    """The stage of a method, with what the plan says for a round."""
    if method == "RigL":
        return rpx.sparse.RigL(sparsity, drop_fraction=planned, where=PRUNED)
    if method == "SET":
        return rpx.sparse.SET(sparsity, drop_fraction=planned, where=PRUNED)
    return rpx.MagnitudePruning(planned, where=PRUNED)


def training(method: str, size: Size) -> Callable[[Array, Array, Array, Array], dict[str, Array]]:
    """Trains and measures, from the key of a seed, a sparsity, and both parts of a plan."""
    split, steps, width = digits(size(1000, 100)), size(STEPS, 2), size(100, 10)
    batch, tx = minibatch(split.train, 50), rpx.optimizer(optax.adam(3e-3))

    def run(key: Array, sparsity: Array, values: Array, moves: Array) -> dict[str, Array]:
        p = stage(method, sparsity, 0.0)
        key_start, key_mask, key_fit = jax.random.split(key, 3)
        raw = p.init(mlp(key_start, (64, *[width] * size(2, 1), 10)), key_mask)

        def step(carry: Carry, key: Array) -> tuple[Carry, None]:
            raw, state = carry
            grads = jax.grad(lambda raw: error(p.apply(raw), batch(key)))(raw)
            with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
                updates, state = tx.update(grads, state, raw)
            return (optax.apply_updates(raw, updates), state), None

        def one_round(carry: Carry, inputs: tuple[Array, Array, Array]) -> tuple[Carry, None]:
            key, value, moves = inputs
            key_steps, key_batch, key_update = jax.random.split(key, 3)
            (raw, state), _ = jax.lax.scan(step, carry, jax.random.split(key_steps, steps))
            dense = jax.grad(error)(p.apply(raw), batch(key_batch))
            moved = stage(method, sparsity, value).update(raw, key_update, dense)
            moved = jax.tree.map(lambda new, old: jnp.where(moves > 0, new, old), moved, raw)
            return (moved, rpx.training.reset_moments(state, raw, moved)), None

        keys = jax.random.split(key_fit, len(values))
        (raw, _), _ = jax.lax.scan(one_round, (raw, tx.init(raw)), (keys, values, moves))
        weights = p.fold(raw)
        return {"valid": accuracy(weights, split.valid), "test": accuracy(weights, split.test)}

    return run


def sparsities(found: Found) -> list[float]:
    """Those on file."""
    return [sparsity for sparsity in SPARSITIES if named("SET", DROPS[0], sparsity) in found]


def chosen(found: Found, method: str) -> float:
    """The setting of the highest validation accuracy, in the mean over sparsities."""
    tried = [setting for setting in SETTINGS[method] if named(method, setting, SPARSITIES[0]) in found]
    return max(tried, key=lambda setting: of_plan(found, accuracies(found, method, setting, "valid")).mean())


def accuracies(found: Found, method: str, setting: float, what: str) -> np.ndarray:
    """Validation or test accuracy, a row for each sparsity."""
    return np.array([found[named(method, setting, sparsity)][what] for sparsity in sparsities(found)])


def tests(found: Found, method: str) -> np.ndarray:
    """Test accuracy at the chosen setting, a row for each sparsity."""
    return accuracies(found, method, chosen(found, method), "test")


def of_plan(found: Found, rows: np.ndarray) -> np.ndarray:
    """The mean over sparsities, for each seed."""
    return rows[np.array(sparsities(found)) <= MOST].mean(0)


def table(found: Found) -> str:
    """Test accuracy in percent: a row for each method, a column for each sparsity."""
    columns = [f"{listed([sparsity])} zeros" for sparsity in sparsities(found)]
    head = ["method", "chosen setting", *columns, f"mean to {listed([MOST])}"]
    rows = [
        [method, described(method, chosen(found, method)), *map(told, [*values, of_plan(found, values)])]
        for method, values in ((method, tests(found, method)) for method in SETTINGS)
    ]
    dense = [DENSE, "", *([told(found[DENSE]["test"])] * (len(columns) + 1))]
    return markdown(head, [*rows, dense])


def picture(found: Found) -> Figure:
    """Errors against sparsity, on a scale that shows small ones too."""
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes, places = figure.add_subplot(), np.arange(len(sparsities(found)))
    axes.axhline(100 - found[DENSE]["test"].mean(), color="black", linewidth=1, label=DENSE)
    for place, (method, (colour, style)) in enumerate(STYLES.items()):
        values = 100 - tests(found, method)
        label = f"{method} ({described(method, chosen(found, method))})"
        x = places + 0.03 * (place - 1.5)  # side by side, so that no bar hides another
        axes.errorbar(x, values.mean(1), stats.sem(values, axis=1), fmt=style, color=colour, label=label, markersize=5)
    axes.set(xlabel="share of zeros in the hidden kernels", ylabel="misclassified test images (%)", yscale="log")
    axes.set_yticks(TICKS, [f"{tick}" for tick in TICKS], minor=False)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(places, [listed([sparsity]) for sparsity in sparsities(found)])
    axes.legend(frameon=False, loc="upper left")
    axes.grid(alpha=0.3)
    return figure


def verdict(found: Found) -> str:
    """The mean over sparsities: the schedule against the others."""
    means = {method: of_plan(found, tests(found, method)) for method in SETTINGS}
    words = {method: difference(means["schedule"], values).word for method, values in means.items()}
    better = [method for method in SETTINGS if words[method] == "higher"]
    rest = [method for method in SETTINGS if method not in (*better, "schedule")]
    return (
        "In the mean over sparsities, pruning on a schedule is better than "
        + (" and ".join(better) or "none of the rest")
        + (f", and not significantly better than {' or '.join(rest)}." if rest else ".")
    )


def sentence(found: Found) -> str:
    """The mean over sparsities, and then the schedule against the end at each."""
    parts = {method: f"({described(method, chosen(found, method))})" for method in SETTINGS}
    means = {method: f"{told(of_plan(found, tests(found, method)))} %" for method in SETTINGS}
    others = [
        f"{method} {parts[method]} has {means[method]}, {apart(found, method, 'schedule')} the schedule's and "
        f"{apart(found, method, 'at the end')} that at the end"
        for method in ("RigL", "SET")
    ]
    return (
        f"In the mean over sparsities up to {listed([MOST])}, test accuracy is {means['schedule']} with pruning on a "
        f"schedule {parts['schedule']}, {apart(found, 'schedule', 'at the end')} the {means['at the end']} of pruning "
        f"at the end {parts['at the end']}; {'; '.join(others)}. "
        f"One by one, the schedule against pruning at the end is {words(found, 'schedule', 'at the end')}."
    )


def apart(found: Found, method: str, other: str) -> str:
    """Whether the mean over sparsities is above that of another method."""
    words = {"higher": "above", "lower": "below", NONE: "not significantly different from"}
    return words[difference(*(of_plan(found, tests(found, each)) for each in (method, other))).word]


def words(found: Found, method: str, other: str) -> str:
    """At which sparsities one method is higher, lower, or no different."""
    places: dict[str, list[float]] = {}
    for sparsity, here, there in zip(sparsities(found), tests(found, method), tests(found, other), strict=True):
        places.setdefault(difference(here, there).word, []).append(sparsity)
    order = {"higher": "more accurate", "lower": "less accurate", NONE: "not significantly different"}
    return " and ".join(f"{said} at {listed(places[word])}" for word, said in order.items() if word in places)


def listed(shares: list[float]) -> str:
    """Shares in percent, such as ``80, 90 and 95 %``."""
    *first, last = (f"{100 * share:.0f}" for share in shares)
    return f"{', '.join(first)} and {last} %" if first else f"{last} %"
