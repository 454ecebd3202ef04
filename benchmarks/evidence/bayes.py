"""Bayes by backprop knows what it does not know.

Blundell, Cornebise, Kavukcuoglu and Wierstra, *Weight Uncertainty in Neural Networks*, 2015, arXiv 1505.05424.

Protocol:
Data: about 240 digits of 8 classes to train on; each seed draws 2 other classes, which the network never sees.
An MLP (64-100-100-8), batches of 50, 1500 steps, Adam from 0.003 down to 0 by a cosine. Plain: 6 weight decays.
Bayes, and with ``local_reparametrization`` local Bayes: 6 settings, of the prior and the weight of its divergence (full
KL: 1). 30 draws predict. Chosen by validation log loss. 5 seeds.
Measure, on test images: accuracy and calibration of the known; entropy of the unknown, and AUROC of telling them by it.
"""

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
from benchmarks.evidence.data import digits
from benchmarks.evidence.digit_nets import Rows, error, logits, mlp
from benchmarks.evidence.record import Cell, Found, Size, over_settings
from benchmarks.evidence.summary import NONE, best, difference, markdown, told
from benchmarks.evidence.training import fit

KNOWN, CLASSES = 8, 10
DECAYS = (0.0, 0.1, 0.3, 1.0, 2.0, 3.0)
PRIORS, WEIGHTS = (0.1, 0.3), (0.03, 0.01, 0.003)
STD = 0.02
"""Of each weight at the start."""
DRAWS = 30
BINS = 10
MEASURES = {
    "accuracy": ("%", 1),
    "log loss": ("nats", 3),
    "calibration error": ("%", 1),
    "entropy, known": ("nats", 2),
    "entropy, unknown": ("nats", 2),
    "AUROC": ("%", 1),
}
"""The unit of each, and how many digits are told."""
UNTUNED = "plain, weight decay 0"
FULL = "full KL, prior 0.3"
STYLES = {
    "plain": ("#0072B2", "o"),
    "Bayes": ("#B84F00", "^"),
    "local Bayes": ("#007A58", "v"),
}


def cells(size: Size) -> dict[str, Cell]:
    """One for each setting of each method, and the Bayesian network with its whole divergence."""
    plain, bayes, each = (over_settings(training(method, size)) for method in STYLES)
    settings = [(prior, weight) for weight in WEIGHTS for prior in PRIORS]
    number = size(len(DECAYS), 2)
    decayed = {f"plain, weight decay {decay:g}": plain(decay, 1, 0) for decay in DECAYS[:number]}
    bayesian = {
        f"{name}, prior {prior:g}, weight {weight:g}": method(0, prior, weight)
        for name, method in (("Bayes", bayes), ("local Bayes", each))
        for prior, weight in settings[:number]
    }
    return decayed | bayesian | {FULL: bayes(0, PRIORS[-1], 1)}


def training(method: str, size: Size) -> Callable[[Array, Array, Array, Array], dict[str, Array]]:
    """Trains and measures, from the key of a seed, a weight decay, a prior, and the weight of its divergence."""
    split, steps, width, draws = digits(size(300, 60)), size(1500, 10), size(100, 10), size(DRAWS, 2)

    def run(key: Array, decay: Array, prior: Array, weight: Array) -> dict[str, Array]:
        key_classes, key_start, key_fit, key_draws = jax.random.split(key, 4)
        train, valid, test = (renumbered(rows, key_classes) for rows in split)
        known = jnp.sum(train[1] < KNOWN).astype(jnp.float32)
        p = rpx.Chain() if method == "plain" else rpx.Gaussian(std=STD, prior=prior)
        share = weight / known
        tx: Any = optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=decay)
        start = mlp(key_start, (64, *[width] * size(2, 1), KNOWN))
        of_loss = rpx.transforms.local_reparametrization if method == "local Bayes" else lambda loss: loss
        batch = batch_of_known(train)
        raw, _, _ = fit(p, start, error, batch, tx, steps, key_fit, penalty=share, of_loss=of_loss)

        def probabilities(x: Array) -> Array:
            keys = jax.random.split(key_draws, draws if p.stochastic else 1)
            return jnp.mean(jax.vmap(lambda key: jax.nn.softmax(logits(p.apply(raw, key), x)))(keys), 0)

        of_valid, of_test = jnp.split(probabilities(jnp.concatenate([valid[0], test[0]])), [len(valid[0])])
        return measured(of_test, test[1]) | {"valid": log_loss(of_valid, valid[1])}

    return run


def renumbered(rows: Rows, key: Array) -> Rows:
    """The same images, with the classes in another order; those from 8 on are unknown."""
    return rows[0], jax.random.permutation(key, CLASSES)[rows[1]]


def batch_of_known(rows: Rows, size: int = 50) -> Callable[[Array], Rows]:
    """Draws rows of known classes."""
    unknown = rows[1] >= KNOWN
    known_first = jnp.argsort(unknown)

    def drawn(key: Array) -> Rows:
        places = known_first[jax.random.randint(key, (size,), 0, jnp.sum(~unknown))]
        return rows[0][places], rows[1][places]

    return drawn


def measured(probabilities: Array, labels: Array) -> dict[str, Array]:
    """What a table shows, on rows of known and unknown classes."""
    known = (labels < KNOWN).astype(jnp.float32)
    unsure = entropy(probabilities)
    right = (jnp.argmax(probabilities, -1) == labels).astype(jnp.float32)
    return {
        "accuracy": 100 * mean_over(right, known),
        "log loss": log_loss(probabilities, labels),
        "calibration error": 100 * calibration_error(probabilities.max(-1), right, known),
        "entropy, known": mean_over(unsure, known),
        "entropy, unknown": mean_over(unsure, 1 - known),
        "AUROC": 100 * auroc(unsure, 1 - known),
    }


def mean_over(values: Array, chosen: Array) -> Array:
    """The mean of the values where ``chosen`` is 1, and not 0."""
    return jnp.sum(values * chosen) / jnp.sum(chosen)


def log_loss(probabilities: Array, labels: Array) -> Array:
    """In nats, on the rows of known classes."""
    known = labels < KNOWN
    of_label = jnp.take_along_axis(probabilities, jnp.where(known, labels, 0)[:, None], -1)[:, 0]
    return mean_over(-jnp.log(of_label + 1e-12), known.astype(jnp.float32))


def entropy(probabilities: Array) -> Array:
    """Of each row, in nats."""
    return jnp.sum(jax.scipy.special.entr(probabilities), -1)


def calibration_error(sure: Array, right: Array, chosen: Array) -> Array:
    """How far the mean confidence and the share of right rows are apart, over bins of like confidence."""
    bins = jax.nn.one_hot(jnp.clip((sure * BINS).astype(jnp.int32), 0, BINS - 1), BINS) * chosen[:, None]
    return jnp.sum(jnp.abs((sure - right) @ bins)) / jnp.sum(chosen)


def auroc(scores: Array, positive: Array) -> Array:
    """The share of pairs of a positive and a negative row in which the positive one has the higher score."""
    gaps = jnp.sign(scores[:, None] - scores[None, :])
    pairs = positive[:, None] * (1 - positive)[None, :]
    return jnp.sum(pairs * (gaps + 1) / 2) / jnp.sum(pairs)


def tried(found: Found, method: str) -> list[str]:
    """The cells of a method."""
    return [name for name in found if name.startswith(f"{method}, ")]


def chosen(found: Found, method: str) -> str:
    """The cell with the least log loss on validation images."""
    return best(found, tried(found, method), "valid", least=True)


def compared(found: Found) -> dict[str, str]:
    """What a row of the table is called, and its cell."""
    return {"plain": UNTUNED} | {f"{method}, tuned": chosen(found, method) for method in STYLES} | {"full KL": FULL}


def setting(name: str) -> str:
    """The setting that the name of a cell says."""
    return name.partition(", ")[2]


def table(found: Found) -> str:
    """Plain without weight decay, all methods at their best, and the whole divergence."""
    head = ["network", "setting", *(f"{what} ({unit})" for what, (unit, _) in MEASURES.items())]
    rows = [
        [row, setting(name), *(told(found[name][what], places) for what, (_, places) in MEASURES.items())]
        for row, name in compared(found).items()
    ]
    return markdown(head, rows)


def picture(found: Found) -> Figure:
    """All settings of all methods, and how unsure the best of them are."""
    figure = Figure(figsize=(7.8, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    for method, (colour, marker) in STYLES.items():
        names = tried(found, method)
        sides = [np.array([found[name][what] for name in names]) for what in ("valid", "AUROC")]
        means, errors = [side.mean(1) for side in sides], [stats.sem(side, axis=1) for side in sides]
        _, _, reach = upper.errorbar(*means, errors[1], errors[0], fmt=marker, color=colour, label=method)
        for bars in reach:
            bars.set(alpha=0.3, linewidth=1)
        best_of = found[chosen(found, method)]
        upper.scatter(best_of["valid"].mean(), best_of["AUROC"].mean(), 200, facecolors="none", edgecolors=colour)
    upper.set(xlabel="log loss on validation images (nats)", ylabel="AUROC of telling unknown classes (%)")
    upper.set_title("All settings; the chosen ones in rings", fontsize=10)
    upper.legend(frameon=False)
    upper.grid(alpha=0.3)
    rows = compared(found)
    for place, (what, colour) in enumerate({"entropy, known": "#0072B2", "entropy, unknown": "#946400"}.items()):
        values = np.array([found[name][what] for name in rows.values()])
        x = np.arange(len(rows)) + 0.36 * (place - 0.5)
        classes = f"{what.removeprefix('entropy, ')} classes"
        lower.bar(x, values.mean(1), 0.34, yerr=stats.sem(values, axis=1), color=colour, label=classes, capsize=3)
    names = ["\n".join(f"{row}, {setting(name)}".split(", ")) for row, name in rows.items()]
    lower.set_xticks(range(len(rows)), names, fontsize=8)
    lower.set(ylabel="entropy of what is predicted (nats)")
    lower.margins(y=0.25)
    lower.set_title("How unsure they are of test images", fontsize=10)
    lower.legend(frameon=False, loc="upper left")
    return figure


def verdict(found: Found) -> str:
    """How well methods tell unknown classes apart, and where each is better or worse than a plain network."""
    plain, *others = (chosen(found, method) for method in STYLES)
    names = dict(zip(tuple(STYLES)[1:], others, strict=True))
    shown = ", ".join(f"{way} {np.mean(found[name]['AUROC']):.1f}" for way, name in {"plain": plain, **names}.items())
    parts = [f"{method} is {_beside(found, name, plain)}" for method, name in names.items()]
    return (
        f"AUROC of telling unknown classes apart, in percent: {shown}. Against a plain network with the best weight "
        f"decay, {' and '.join(parts)}."
    )


def _beside(found: Found, name: str, plain: str) -> str:
    """The measures in which a cell is better, and those in which it is worse."""
    names = {"higher": ("AUROC", "accuracy"), "lower": ("calibration error", "log loss")}
    words = {
        what: (good, difference(found[name][what], found[plain][what]).word) for good in names for what in names[good]
    }
    better = [what for what, (good, word) in words.items() if word == good]
    worse = [what for what, (good, word) in words.items() if word not in (good, NONE)]
    sides = [f"{side} in {' and '.join(which)}" for side, which in (("better", better), ("worse", worse)) if which]
    return ", ".join(sides) or "not significantly different"


def sentence(found: Found) -> str:
    """Bayes by backprop against plain networks with the best weight decay and without any, and with local draws."""
    plain, bayes, each = (chosen(found, method) for method in STYLES)
    return (
        f"Against a plain network with the best weight decay ({plain.rpartition(' ')[2]}), Bayes by backprop "
        f"({setting(bayes)}) shows {against(found, bayes, plain)}. "
        f"Against a plain network without weight decay it shows {against(found, bayes, UNTUNED)}. "
        f"With a draw for each example ({setting(each)}) it shows, against one draw for a batch, "
        f"{against(found, each, bayes)}. "
        f"With the whole divergence, Bayes by backprop shows, against the chosen weight, {against(found, FULL, bayes)}."
    )


def against(found: Found, first: str, second: str) -> str:
    """Measure by measure, which is higher."""
    words = {"higher": "a higher", "lower": "a lower", NONE: "no significant difference in"}
    names = {"entropy, unknown": "entropy of unknown classes"}
    parts = []
    for what in ("AUROC", "calibration error", "entropy, unknown", "accuracy"):
        here, there = found[first][what], found[second][what]
        unit, places = MEASURES[what]
        word = words[difference(here, there).word]
        parts.append(f"{word} {names.get(what, what)} ({told(here, places)} against {told(there, places)} {unit})")
    return f"{', '.join(parts[:-1])}, and {parts[-1]}"
