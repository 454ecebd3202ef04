"""Noise on the weights while training: the network tolerates noise and rounding of its weights better.

Graves, *Practical Variational Inference for Neural Networks*, 2011; Gulati et al., *Conformer*, 2020, arXiv 2005.08100,
uses a standard deviation of 0.075, by the ``variational noise`` of Lingvo.

Protocol:
Handwritten digits with 128 hidden units, accuracy; Python's documentation with an LSTM of 64 units, bits per character.
Trained plain, with weight decay, with noise, and with noise on weights under weight norm; three settings for each.
For every method we pick the setting that is best on validation data with noise of 0.1 on the weights, as we test that.
Measured on test data with noise on all weights, absolute and relative to the spread of each array, means of 3 draws,
and with matrices rounded to 2 to 8 bits, evenly from minus to plus their largest magnitude. Five seeds.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure
from scipy import stats

import reparax as rpx
from benchmarks.evidence import char_lstm, data
from benchmarks.evidence.record import Cell, Found, Size, over_settings
from benchmarks.evidence.summary import NONE, best, difference, markdown, told
from benchmarks.evidence.training import fit

PLAIN, DECAY, NOISE, NORM = "plain", "weight decay", "weight noise", "weight norm >> noise"
SETTINGS = {PLAIN: (0.0,), DECAY: (0.01, 0.1, 1.0), NOISE: (0.0375, 0.075, 0.15), NORM: (0.0375, 0.075, 0.15)}
STYLES = {PLAIN: ("#000000", "o-"), DECAY: ("#0072B2", "s--"), NOISE: ("#B84F00", "^-"), NORM: ("#007A58", "D-.")}

STDS = (0.0, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3)
RELATIVE = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8)
BITS = (2, 3, 4, 5, 6, 7, 8)
DRAWS = 3
TOLD_STD, TOLD_RELATIVE, TOLD_BITS = 0.1, 0.4, 3
"""What the table and the sentence report; the first also chooses the settings."""


class Task(NamedTuple):
    """What is trained and measured.

    Attributes:
      init: The parameters of one key.
      loss: Of weights, a batch and a key.
      batch: Draws one from a key.
      rate: Learning rate of Adam.
      steps: How many.
      valid: The measure of weights on validation data.
      test: On test data.
    """

    init: Callable[[Array], Any]
    loss: Callable[[Any, Any, Array], Array]
    batch: Callable[[Array], Any]
    rate: float
    steps: int
    valid: Callable[[Any], Array]
    test: Callable[[Any], Array]


def digits(size: Size) -> Task:
    """Handwritten digits, and accuracy in percent."""
    split, hidden = data.digits(), size(128, 8)

    def init(key: Array) -> Any:
        keys = jax.random.split(key)
        he = jax.nn.initializers.he_normal()
        return {
            "hidden": {"kernel": he(keys[0], (64, hidden)), "bias": jnp.zeros(hidden)},
            "out": {"kernel": he(keys[1], (hidden, 10)), "bias": jnp.zeros(10)},
        }

    def logits(weights: Any, x: Array) -> Array:
        hidden, out = weights["hidden"], weights["out"]
        x = jax.nn.relu(x @ hidden["kernel"] + hidden["bias"][None])
        return x @ out["kernel"] + out["bias"][None]

    def loss(weights: Any, rows: Array, key: Array) -> Array:
        x, y = (part[rows] for part in split.train)
        return optax.softmax_cross_entropy_with_integer_labels(logits(weights, x), y).mean()

    def accuracy(of: tuple[Array, Array], weights: Any) -> Array:
        return 100 * jnp.mean(jnp.argmax(logits(weights, of[0]), axis=-1) == of[1], dtype=jnp.float32)

    return Task(
        init,
        loss,
        lambda key: jax.random.randint(key, (64,), 0, len(split.train[1])),
        rate=0.003,
        steps=size(1000, 4),
        valid=functools.partial(accuracy, split.valid),
        test=functools.partial(accuracy, split.test),
    )


def text(size: Size) -> Task:
    """Python's documentation, and bits per character."""
    text, length = data.text(), size(5000, 500)
    ids = jnp.asarray(text.ids)

    def held_out(place: int) -> Callable[[Any], Array]:
        return lambda weights: char_lstm.bits(weights, char_lstm.rows(ids[place : place + length], 100))

    return Task(
        lambda key: char_lstm.init(key, text.size, size(64, 4)),
        lambda weights, rows, key: char_lstm.bits(weights, rows),
        lambda key: char_lstm.windows(ids[:400_000], key, size(16, 2), size(50, 4)),
        rate=0.01,
        steps=size(1000, 4),
        valid=held_out(420_000),
        test=held_out(430_000),
    )


TASKS = {"digits": digits, "text": text}
LEAST = {"digits": False, "text": True}
UNITS = {"digits": "accuracy in percent", "text": "bits per character"}
RELATIONS = {"higher": "higher than", "lower": "lower than", NONE: "no significant difference from"}
DIGITS = {"digits": 1, "text": 3}


def run(task: Task, size: Size, norm: rpx.Parametrization, key: Array, std: Array, decay: Array) -> dict[str, Array]:
    """One seed: trained, and measured with perturbed weights."""
    p = norm >> rpx.VarNoise(std)
    optimizer = optax.adamw(task.rate, weight_decay=decay)
    weights = p.fold(fit(p, task.init(key), task.loss, task.batch, optimizer, task.steps, key)[0])
    draws = jax.random.split(jax.random.fold_in(key, 1), size(DRAWS, 1))

    def noisy(score: Callable[[Any], Array], std: Array, relative: Array) -> Array:
        noise = rpx.VarNoise(relative, relative="std") >> rpx.VarNoise(std)
        return jax.lax.map(lambda key: score(noise.apply(weights, key)), draws).mean()

    stds = jnp.array([(std, 0.0) for std in STDS] + [(0.0, relative) for relative in RELATIVE])
    noise, relative = jnp.split(jax.lax.map(lambda pair: noisy(task.test, *pair), stds), [len(STDS)])
    return {
        "valid": noisy(task.valid, jnp.float32(TOLD_STD), jnp.float32(0)),
        "noise": noise,
        "relative": relative,
        "rounded": jax.lax.map(lambda bits: task.test(rounded(weights, bits)), jnp.array(BITS, jnp.float32)),
    }


def rounded(weights: Any, bits: Array) -> Any:
    """Each matrix with ``2**bits`` values, evenly from minus to plus its largest magnitude."""

    def of_matrix(w: Array) -> Array:
        if w.ndim < 2:
            return w
        largest, gaps = jnp.max(jnp.abs(w)), 2.0**bits - 1
        return largest * (2 / gaps * jnp.round((w / largest + 1) / 2 * gaps) - 1)

    return jax.tree.map(of_matrix, weights)


def cells(size: Size) -> dict[str, Cell]:
    """One for each task, method and setting; at tiny size without weight norm."""
    made = {}
    for name, make in TASKS.items():
        task = make(size)
        bare, normed = (
            over_settings(functools.partial(run, task, size, norm)) for norm in (rpx.Chain(), rpx.WeightNorm(axis=-1))
        )
        for method in list(SETTINGS)[: size(4, 3)]:
            for setting in SETTINGS[method][: size(3, 1)]:
                numbers = (0.0, setting) if method == DECAY else (setting, 0.0)
                made[f"{name}, {method}, {setting}"] = (normed if method == NORM else bare)(*numbers)
    return made


def chosen(found: Found, task: str) -> dict[str, str]:
    """The cell of each method that is best on the validation data of a task."""
    settings = {method: [name for name in found if name.startswith(f"{task}, {method}, ")] for method in SETTINGS}
    return {method: best(found, names, "valid", least=LEAST[task]) for method, names in settings.items() if names}


def label(method: str, name: str) -> str:
    """A method with its best setting."""
    return method if method == PLAIN else f"{method} ({name.rpartition(' ')[2]})"


def reported(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the table and the sentence say of a cell."""
    return {
        "as trained": values["noise"][:, 0],
        f"with noise of {TOLD_STD}": values["noise"][:, STDS.index(TOLD_STD)],
        f"with noise of {TOLD_RELATIVE} of the spread": values["relative"][:, RELATIVE.index(TOLD_RELATIVE)],
        f"with {TOLD_BITS} bits": values["rounded"][:, BITS.index(TOLD_BITS)],
    }


def table(found: Found) -> str:
    """A row for each task and method, at its best setting."""
    rows = [
        [
            f"{task}, {UNITS[task]}",
            label(method, name),
            *(told(x, DIGITS[task]) for x in reported(found[name]).values()),
        ]
        for task in TASKS
        for method, name in chosen(found, task).items()
    ]
    return markdown(["task", "trained with", *reported(next(iter(found.values())))], rows)


def picture(found: Found) -> Figure:
    """Each measure against the size of what perturbs the weights."""
    figure = Figure(figsize=(7.8, 6.6), layout="constrained")
    panels = {
        "noise": (STDS, "standard deviation\nof noise on weights"),
        "relative": (RELATIVE, "noise in units\nof each array's spread"),
        "rounded": (BITS, "bits of each weight"),
    }
    for task, part in zip(TASKS, figure.subfigures(2, 1), strict=True):
        line = part.subplots(1, 3)
        for axes, (what, (places, words)) in zip(line, panels.items(), strict=True):
            for method, name in chosen(found, task).items():
                colour, style = STYLES[method]
                values = found[name][what]
                mean, error = values.mean(0), stats.sem(values)
                axes.plot(places, mean, style, color=colour, markersize=4, label=label(method, name))
                axes.fill_between(places, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
            axes.set(xlabel=words)
            axes.grid(alpha=0.3)
        line[0].set(ylabel=f"{task}: {UNITS[task]}")
        shown = line[0].get_legend_handles_labels()
        part.legend(*shown, loc="outside upper center", ncols=4, fontsize=8, columnspacing=1)
    return figure


def verdict(found: Found) -> str:
    """In how many of the comparisons noise helps, and whether weight norm adds to it."""
    plain, norm = (_better(found, *pair) for pair in ((NOISE, PLAIN), (NORM, NOISE)))
    return (
        f"Weights that were trained with noise tolerate noise and rounding better than plain ones in {sum(plain)} of "
        f"{len(plain)} comparisons. Weight norm under the noise is better than noise alone in {sum(norm)} of "
        f"{len(norm)}."
    )


def _better(found: Found, method: str, other: str) -> list[bool]:
    """For each task that ran both and each perturbation, whether a method is significantly better than another."""
    compared: list[bool] = []
    for task in TASKS:
        names = chosen(found, task)
        if not {method, other} <= names.keys():
            continue
        here, there = (reported(found[names[each]]) for each in (method, other))
        wanted = "lower" if LEAST[task] else "higher"
        compared += [difference(here[what], there[what]).word == wanted for what in here if what != "as trained"]
    return compared


def sentence(found: Found) -> str:
    """What noise in training does against each other method, for each task and perturbation."""
    return " ".join(_of_task(found, task) for task in TASKS)


def _of_task(found: Found, task: str) -> str:
    names, digits = chosen(found, task), DIGITS[task]
    ours = reported(found[names[NOISE]])
    others = {label(method, names[method]): reported(found[names[method]]) for method in (PLAIN, DECAY)}

    def compared(what: str) -> str:
        each = (
            f"{RELATIONS[difference(ours[what], values[what]).word]} {name}, {told(values[what], digits)}"
            for name, values in others.items()
        )
        return f"{told(ours[what], digits)} {what} ({'; '.join(each)})"

    return f"On {task} ({UNITS[task]}), {label(NOISE, names[NOISE])} gives {', '.join(map(compared, ours))}."
