"""Weight norm speeds the start of training and is robust to the learning rate.

Salimans and Kingma, *Weight Normalization: A Simple Reparameterization to Accelerate Training of Deep Neural Networks*,
2016, arXiv 1602.07868.

Protocol:
Data: 1000 digits. An MLP (64-100-100-10) and a conv net (two layers of 3 x 3, one dense), batches of 50, 400 steps.
Four methods: plain or weight norm, each from He's start and from the paper's, which scales each unit by the data.
Each has the same 9 learning rates over 4 decades; the best one is chosen by runs of other seeds. 5 seeds.
Measure: steps until the training loss, a mean over 20 steps, is at most 0.1 nats; a run that never gets there has 400.
Width: half a decade for each rate that gets there.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure

import reparax as rpx
from benchmarks.evidence.data import digits
from benchmarks.evidence.digit_nets import Params, accuracy, conv_net, error, from_data, minibatch, mlp
from benchmarks.evidence.record import Cell, Found, Size, over_settings
from benchmarks.evidence.summary import best, difference, markdown, told
from benchmarks.evidence.training import fit

TASKS = {"MLP, SGD": -3.0, "conv net, SGD": -3.0, "MLP, Adam": -4.0}
"""The network and the optimizer, and the exponent of the least learning rate."""
DECADES = 4
PER_DECADE = 2
METHODS = ("plain", "weight norm", "plain, from data", "weight norm, from data")
STYLES = (("#000000", "o-"), ("#B84F00", "^-"), ("#0072B2", "s--"), ("#007A58", "D--"))
STEPS = 400
WINDOW = 20
GOAL = 0.1


def cells(size: Size) -> dict[str, Cell]:
    """One for each task, method and learning rate."""
    found = {}
    for task in list(TASKS)[: size(len(TASKS), 1)]:
        least = TASKS[task]
        exponents = np.linspace(least, least + DECADES, size(DECADES * PER_DECADE + 1, 3))
        for method in METHODS[: size(4, 2)]:
            trained = over_settings(training(task, method, size))
            found |= {f"{task}: {method}, rate {10.0**e:.3g}": trained(10.0**e) for e in exponents}
    return found


def training(task: str, method: str, size: Size) -> Callable[[Array, Array], dict[str, Array]]:
    """Trains and measures, from the key of a seed and a learning rate."""
    network, optimizer = task.split(", ")
    p = rpx.WeightNorm(axis=-1) if method.startswith("weight norm") else rpx.Chain()
    split, steps = digits(size(1000, 100)), size(STEPS, 2 * WINDOW)

    def start(key: Array) -> Params:
        if network == "MLP":
            params = mlp(key, (64, size(100, 8), size(100, 8), 10))
        else:
            params = conv_net(key, size(16, 2), size(32, 4))
        return from_data(params, split.train[0]) if method.endswith("from data") else params

    def once(key: Array, rate: Array) -> tuple[Array, Array, Array]:
        key_start, key_fit = jax.random.split(key)
        tx = optax.sgd(rate, momentum=0.9) if optimizer == "SGD" else optax.adam(rate)
        raw, losses, _ = fit(p, start(key_start), error, minibatch(split.train, 50), tx, steps, key_fit)
        return *steps_to_goal(losses), accuracy(p.fold(raw), split.test)

    def twice(key: Array, rate: Array) -> dict[str, Array]:
        (other, steps), (_, reached), (_, test) = jax.vmap(once, (0, None))(jax.random.split(key), rate)
        return {"steps of another seed": other, "steps": steps, "reached": reached, "test accuracy": test}

    return twice


def steps_to_goal(losses: Array) -> tuple[Array, Array]:
    """How many steps it takes until the mean of the last few losses is small, and whether it ever is."""
    means = jnp.convolve(losses, jnp.full(WINDOW, 1 / WINDOW), mode="valid")
    small = means <= GOAL
    return jnp.where(small.any(), WINDOW + jnp.argmax(small), len(losses)), small.any()


def of_method(found: Found, task: str, method: str) -> dict[float, str]:
    """The cells of a method, by their learning rates."""
    begin = f"{task}: {method}, rate "
    return {float(name.removeprefix(begin)): name for name in found if name.startswith(begin)}


def fastest(found: Found, task: str, method: str) -> tuple[float, dict[str, np.ndarray]]:
    """The best learning rate of a method, and what was found there."""
    rates = of_method(found, task, method)
    chosen = best(found, rates.values(), "steps of another seed", least=True)
    return next(rate for rate, name in rates.items() if name == chosen), found[chosen]


def width(found: Found, task: str, method: str) -> np.ndarray:
    """Decades of learning rates that reach the goal, for each seed."""
    return sum(found[name]["reached"] for name in of_method(found, task, method).values()) / PER_DECADE


def tasks(found: Found) -> list[str]:
    """Those on file."""
    return [task for task in TASKS if of_method(found, task, "plain")]


def methods(found: Found) -> list[str]:
    """Those on file."""
    return [method for method in METHODS if of_method(found, tasks(found)[0], method)]


def table(found: Found) -> str:
    """A row for each task and method."""
    rows = []
    for task in tasks(found):
        for method in methods(found):
            rate, values = fastest(found, task, method)
            steps, test = told(values["steps"], 0), told(values["test accuracy"])
            rows.append([task, method, f"{rate:.3g}", steps, told(width(found, task, method)), test])
    return markdown(["task", "method", "best rate", "steps", "width (decades)", "test accuracy (%)"], rows)


def picture(found: Found) -> Figure:
    """Steps against the learning rate, a panel for each task."""
    figure = Figure(figsize=(7.8, 3.4), layout="constrained")
    panels = figure.subplots(1, len(tasks(found)), sharey=True, squeeze=False)[0]
    for axes, task in zip(panels, tasks(found), strict=True):
        for method, (colour, style) in zip(methods(found), STYLES, strict=False):
            rates = of_method(found, task, method)
            steps = np.array([found[name]["steps"] for name in rates.values()])
            error_bars = steps.std(1, ddof=1) / np.sqrt(steps.shape[1])
            axes.errorbar(list(rates), steps.mean(1), error_bars, fmt=style, color=colour, label=method, markersize=4)
        axes.set(title=task, xlabel="learning rate", xscale="log")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel=f"steps to a training loss of {GOAL}", ylim=(0, None))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def verdict(found: Found) -> str:
    """In how many networks weight norm is faster, and in how many it allows more learning rates."""
    names = tasks(found)
    steps = [[fastest(found, task, way)[1]["steps"] for way in ("weight norm", "plain")] for task in names]
    widths = [[width(found, task, way) for way in ("weight norm", "plain")] for task in names]
    sooner = sum(difference(*pair).word == "lower" for pair in steps)
    wider = sum(difference(*pair).word == "higher" for pair in widths)
    return (
        f"At the best learning rate weight norm is faster in {sooner} of {len(names)} networks; more learning rates "
        f"work with it in {wider} of {len(names)}."
    )


def sentence(found: Found) -> str:
    """Speed, then width, then what a start from data does by itself."""
    said = [
        f"Steps to the loss at the best learning rate, weight norm against plain: "
        f"{steps_against(found, 'weight norm', 'plain')}.",
        f"Decades of learning rates that get there: {widths_against(found)}.",
    ]
    if "plain, from data" in methods(found):
        alone = steps_against(found, "plain, from data", "plain")
        said.append(f"Steps of the paper's start from data without weight norm, against plain: {alone}.")
    return " ".join(said)


def steps_against(found: Found, first: str, second: str) -> str:
    """The steps of two methods, task by task."""
    parts = []
    for task in tasks(found):
        (rate, values), (other_rate, others) = fastest(found, task, first), fastest(found, task, second)
        numbers = f"{told(values['steps'], 0)} (rate {rate:.3g}) against {told(others['steps'], 0)} ({other_rate:.3g})"
        word = difference(values["steps"], others["steps"]).word
        parts.append(f"{numbers} for {in_words(task)}, {word.replace('higher', 'more').replace('lower', 'fewer')}")
    return "; ".join(parts)


def widths_against(found: Found) -> str:
    """The widths of weight norm and plain, task by task."""
    parts = []
    for task in tasks(found):
        here, there = width(found, task, "weight norm"), width(found, task, "plain")
        word = difference(here, there).word.replace("higher", "more").replace("lower", "fewer")
        parts.append(f"{told(here)} against {told(there)} for {in_words(task)}, {word}")
    return "; ".join(parts)


def in_words(task: str) -> str:
    """A task as a sentence names it."""
    return f"the {task.replace(', ', ' with ')}"
