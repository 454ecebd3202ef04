"""Dropping hidden-to-hidden weights, with one mask for all steps, beats dropping activations.

Merity, Keskar and Socher, *Regularizing and Optimizing LSTM Language Models*, 2017, arXiv 1708.02182 (AWD-LSTM).
Compared with: dropped outputs, as of Zaremba, Sutskever and Vinyals, 2014; and a dropped state that the next step
reads, with one mask for all steps as of Gal and Ghahramani, 2016.

Protocol:
10,000 characters of Python's documentation, which an LSTM of 96 units learns by heart within 1000 steps of Adam.
Dropped: hidden-to-hidden weights; the state that the next step reads, with new masks or one for all steps; outputs.
Three rates for each; validation text chooses the rate, and of 10 points of the training the one to stop at.
Five seeds; bits per character of 10,000 held-out characters of other pages of the documentation, which played no part
in choosing settings.
"""

import functools

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
from benchmarks.evidence.summary import against, best, difference, markdown, told
from benchmarks.evidence.training import fit

NOTHING, WEIGHTS = "nothing", "hidden-to-hidden weights"
STATE, STATE_ONE_MASK, OUTPUTS = "state, new masks", "state, one mask", "outputs, new masks"
METHODS = (NOTHING, WEIGHTS, STATE, STATE_ONE_MASK, OUTPUTS)
RATES = (0.3, 0.5, 0.7)
STEPS, LOOKS = 1000, 10
STYLES = dict(
    zip(
        METHODS,
        (("#000000", "o-"), ("#B84F00", "^-"), ("#0072B2", "s--"), ("#007A58", "D-."), ("#A34F80", "v--")),
        strict=True,
    )
)


def masks(method: str, rate: Array, key: Array, shape: tuple[int, int, int]) -> dict[str, Array]:
    """What multiplies the activations of ``shape``, ``(time, batch, units)``."""
    if method not in (STATE, STATE_ONE_MASK, OUTPUTS):
        return {}
    drawn = (1, *shape[1:]) if method == STATE_ONE_MASK else shape
    factors = jnp.where(jax.random.bernoulli(key, 1 - rate, drawn), 1 / (1 - rate), 0.0)
    return {"shown" if method == OUTPUTS else "read": jnp.broadcast_to(factors, shape)}


def run(method: str, size: Size, key: Array, rate: Array) -> dict[str, Array]:
    """One seed: bits per character where the validation text says to stop, and on the way."""
    text = data.text()
    ids = jnp.asarray(text.ids)
    train, length = ids[100_000:110_000], size(10_000, 1000)
    held_out = jnp.stack([char_lstm.rows(ids[place : place + length], 100) for place in (300_000, 320_000)])
    shape = (size(50, 4), size(16, 2), size(96, 4))
    p = rpx.WeightDropout(rate, where="lstm/hidden") if method == WEIGHTS else rpx.Chain()
    _, losses, looked = fit(
        p,
        char_lstm.init(key, text.size, shape[2]),
        lambda weights, rows, key: char_lstm.bits(weights, rows, **masks(method, rate, key, shape)),
        lambda key: char_lstm.windows(train, key, shape[1], shape[0]),
        optax.adam(0.01),
        size(STEPS, 4),
        key,
        look=lambda raw: jax.lax.map(lambda rows: char_lstm.bits(p.fold(raw), rows), held_out),
        looks=size(LOOKS, 2),
    )
    of_valid, of_test = looked.T
    stop = jnp.argmin(of_valid)
    return {
        "valid": of_valid[stop],
        "test": of_test[stop],
        "stop": (stop + 1) * (losses.size // of_valid.size),
        "course": of_valid,
        "end": of_test[-1],
    }


def cells(size: Size) -> dict[str, Cell]:
    """One for each method and rate; at tiny size of three methods."""
    made = {}
    for method in METHODS[: size(len(METHODS), 3)]:
        cell = over_settings(functools.partial(run, method, size))
        rates = (0.0,) if method == NOTHING else RATES[: size(len(RATES), 1)]
        made |= {f"{method}, rate {rate}": cell(rate) for rate in rates}
    return made


def rates(found: Found, method: str) -> dict[float, str]:
    """The cells of a method."""
    return {float(name.rpartition(" ")[2]): name for name in found if name.startswith(f"{method}, rate")}


def chosen(found: Found) -> dict[str, str]:
    """The cell of each method that is best on the validation text."""
    tried = {method: rates(found, method).values() for method in METHODS}
    return {method: best(found, names, "valid", least=True) for method, names in tried.items() if names}


def table(found: Found) -> str:
    """A row for each method, at its best rate."""
    head = ["dropped", "rate", "steps", "bits per character", "after all steps", "weight dropout is"]
    weights = found[chosen(found)[WEIGHTS]]["test"]
    return markdown(
        head,
        (
            [
                method,
                name.rpartition(" ")[2] if method != NOTHING else "",
                told(found[name]["stop"], 0),
                told(found[name]["test"], 3),
                told(found[name]["end"], 3),
                against(weights, found[name]["test"], 3) if method != WEIGHTS else "",
            ]
            for method, name in chosen(found).items()
        ),
    )


def picture(found: Found) -> Figure:
    """Validation text over the training, at the best rate; and test text against the rate."""
    figure = Figure(figsize=(7.8, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, name in chosen(found).items():
        colour, style = STYLES[method]
        course = found[name]["course"]
        steps = np.arange(1, course.shape[1] + 1) * (STEPS // LOOKS)
        mean, error = course.mean(0), stats.sem(course)
        left.plot(steps, mean, style, color=colour, markersize=4, label=label(method, name))
        left.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
        tests = [found[cell]["test"] for cell in rates(found, method).values()]
        means, errors = np.mean(tests, axis=1), stats.sem(tests, axis=1)
        if method == NOTHING:
            right.axhline(means[0], color=colour)
            right.axhspan(means[0] - errors[0], means[0] + errors[0], color=colour, alpha=0.15, linewidth=0)
        else:
            right.errorbar(list(rates(found, method)), means, errors, fmt=style, color=colour, markersize=5, capsize=3)
    left.set(xlabel="steps", ylabel="bits per character, validation", title="at the best rate")
    right.set(xlabel="rate", xticks=RATES, ylabel="bits per character, test", title="stopped where validation is best")
    left.legend(title="dropped", alignment="left", frameon=False, fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def label(method: str, name: str) -> str:
    """A method with its best rate."""
    return method if method == NOTHING else f"{method} ({name.rpartition(' ')[2]})"


def verdict(found: Found) -> str:
    """What dropped weights beat, and what they do not."""
    names = chosen(found)
    weights = found[names[WEIGHTS]]["test"]
    others = [method for method in names if method != WEIGHTS]
    beaten = [each for each in others if difference(weights, found[names[each]]["test"]).word == "lower"]
    rest = [f"{each} ({_mean(found, names, each)})" for each in others if each not in beaten]
    return (
        f"Dropping hidden-to-hidden weights ({_mean(found, names, WEIGHTS)} bits per character) is better than "
        "dropping "
        + (" and than dropping ".join(beaten) or "none of the rest")
        + (f"; no significant difference from dropping {' or '.join(rest)}." if rest else ".")
    )


def _mean(found: Found, names: dict[str, str], method: str) -> str:
    return f"{found[names[method]]['test'].mean():.3f}"


def sentence(found: Found) -> str:
    """How dropped weights compare with each other method."""
    names = chosen(found)
    weights = found[names[WEIGHTS]]["test"]
    others = [
        f"{label(method, name)}, {told(found[name]['test'], 3)}: {against(weights, found[name]['test'], 3)}"
        for method, name in names.items()
        if method != WEIGHTS
    ]
    rate = names[WEIGHTS].rpartition(" ")[2]
    return (
        f"Dropping hidden-to-hidden weights (rate {rate}) gives {told(weights, 3)} bits per character of held-out "
        f"text. Against what else is dropped, at the best rate of each: {'; '.join(others)}."
    )
