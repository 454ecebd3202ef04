"""An orthogonal recurrent matrix remembers what an LSTM forgets.

Arjovsky, Shah and Bengio, *Unitary Evolution Recurrent Neural Networks*, 2016 (arXiv 1511.06464), and Lezcano-Casado
and Martínez-Rubio, *Cheap Orthogonal Constraints in Neural Networks*, 2019 (arXiv 1901.08428).

Protocol:
Copying: recall 10 symbols out of 8 after T = 100, 300 or 1000 blanks; 8 fresh sequences in each step. A plain network
of 128 units with modReLU, its recurrent matrix orthogonal by the Cayley map (rotations at first), against an LSTM of
64 units, about as many numbers. Adam, clipped gradients, 3 learning rates; 5 seeds. Measure: steps until the mean loss
of 20 steps is under 0.9 of the baseline without memory, 10 log(8) / (T + 20). Runs stop at 0.5 of it, or after 1500,
1000 or 500 steps. We report the rate with the fewest steps or, if none leaves the baseline, the lowest loss.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure

import reparax as rpx
from benchmarks.evidence.record import Cell, Found, Size
from benchmarks.evidence.summary import difference, markdown, told

PyTree = Any

SYMBOLS, RECALLED = 8, 10
BLANK, MARKER, INPUTS = 0, SYMBOLS + 1, SYMBOLS + 2
STEPS = {100: 1500, 300: 1000, 1000: 500}
"""For each number of blanks the steps after which a run is cut."""
CHUNK, BATCH = 20, 8
LEFT, STOP = 0.9, 0.5
"""Shares of the baseline: where it counts as left, and where a run stops."""


def sequences(key: Array, blanks: int, batch: int) -> tuple[Array, Array]:
    """What is read and what is to be said, time first: symbols, blanks, and from the marker on the symbols again."""
    symbols = jax.random.randint(key, (RECALLED, batch), 1, SYMBOLS + 1)
    silence = jnp.zeros((blanks + RECALLED, batch), symbols.dtype)
    return jnp.concatenate([symbols, silence.at[blanks - 1].set(MARKER)]), jnp.concatenate([silence, symbols])


def baseline(blanks: int) -> float:
    """The loss of a network that says blanks, and then any symbol."""
    return RECALLED * math.log(SYMBOLS) / (blanks + 2 * RECALLED)


def readout(key: Array, units: int, blanks: int) -> PyTree:
    """A small matrix, and the log of how often each symbol is to be said."""
    share = RECALLED / (blanks + 2 * RECALLED)
    often = jnp.array([1 - share, *[share / SYMBOLS] * SYMBOLS])
    return {"kernel": 0.1 * jax.random.normal(key, (units, SYMBOLS + 1)) / units**0.5, "bias": jnp.log(often)}


def rotations(key: Array, units: int) -> Array:
    """Turns every two units by an angle of its own, as Henaff, Szlam and LeCun (2016) start on this task."""
    angles = jax.random.uniform(key, (units // 2,), minval=-jnp.pi, maxval=jnp.pi)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jax.scipy.linalg.block_diag(*jnp.stack([cos, -sin, sin, cos], -1).reshape(-1, 2, 2))


def plain_params(key: Array, units: int, blanks: int) -> PyTree:
    """Of the plain recurrent network."""
    hidden, inputs, out = jax.random.split(key, 3)
    cell = {
        "hidden": rotations(hidden, units),
        "input": jax.random.normal(inputs, (INPUTS, units)) / units**0.5,
        "bias": jnp.zeros(units),
    }
    return {"cell": cell, "out": readout(out, units, blanks)}


def plain_states(cell: PyTree, words: Array) -> Array:
    """The states of a plain recurrent network with modReLU, which moves the magnitude and keeps the sign."""

    def step(h: Array, x: Array) -> tuple[Array, Array]:
        z = h @ cell["hidden"] + x
        h = jnp.sign(z) * jax.nn.relu(jnp.abs(z) + cell["bias"][None])
        return h, h

    start = jnp.zeros((words.shape[1], len(cell["hidden"])))
    return jax.lax.scan(step, start, cell["input"][words], unroll=4)[1]


def lstm_params(key: Array, units: int, blanks: int) -> PyTree:
    """Of the LSTM; the gate that keeps starts open."""
    hidden, inputs, out = jax.random.split(key, 3)
    draw = partial(jax.random.uniform, minval=-(units**-0.5), maxval=units**-0.5)
    cell = {
        "hidden": draw(hidden, (units, 4 * units)),
        "input": draw(inputs, (INPUTS, 4 * units)),
        "bias": jnp.concatenate([jnp.zeros(units), jnp.ones(units), jnp.zeros(2 * units)]),
    }
    return {"cell": cell, "out": readout(out, units, blanks)}


def lstm_states(cell: PyTree, words: Array) -> Array:
    """The states of an LSTM."""

    def step(carry: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = carry
        i, f, g, o = jnp.split(h @ cell["hidden"] + x, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((words.shape[1], len(cell["hidden"])))
    return jax.lax.scan(step, (zeros, zeros), (cell["input"] + cell["bias"][None])[words], unroll=4)[1]


class Method(NamedTuple):
    """A way to remember.

    Attributes:
      params: From a key, the number of units, and how many blanks there are.
      states: From the parameters of the cell and the words that are read.
      p: Makes the weights.
      units: How many at full size, and at tiny size.
      rates: Learning rates to choose from.
    """

    params: Callable[[Array, int, int], PyTree]
    states: Callable[[PyTree, Array], Array]
    p: rpx.Parametrization
    units: tuple[int, int]
    rates: tuple[float, ...]


METHODS: Mapping[str, Method] = {
    "orthogonal": Method(
        plain_params, plain_states, rpx.Orthogonal(where="cell/hidden"), (128, 16), (1e-4, 3e-4, 1e-3)
    ),
    "LSTM": Method(lstm_params, lstm_states, rpx.Chain(), (64, 8), (1e-3, 3e-3, 1e-2)),
}


def losses(method: Method, units: int, blanks: int, rate: float, steps: int, key: Array) -> tuple[PyTree, Array]:
    """Trains; the raw tree, and the mean loss of each chunk as a share of the baseline, once stopped the last one."""
    key_init, key_steps = jax.random.split(key)
    tx = rpx.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate)))
    raw = method.p.init(method.params(key_init, units, blanks))

    def loss(raw: PyTree, key: Array) -> Array:
        weights, (words, said) = method.p.apply(raw), sequences(key, blanks, BATCH)
        out = weights["out"]
        logits = method.states(weights["cell"], words) @ out["kernel"] + out["bias"][None, None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, said).mean() / baseline(blanks)

    def step(carry: tuple[PyTree, PyTree], key: Array) -> tuple[tuple[PyTree, PyTree], Array]:
        raw, state = carry
        value, grads = jax.value_and_grad(loss)(raw, key)
        with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
            updates, state = tx.update(grads, state, raw)
        return (optax.apply_updates(raw, updates), state), value

    def chunk(carry: tuple[PyTree, Array, Array]) -> tuple[PyTree, Array, Array]:
        trained, place, means = carry
        keys = jax.random.split(jax.random.fold_in(key_steps, place), CHUNK)
        trained, values = jax.lax.scan(step, trained, keys)
        later = jnp.arange(len(means)) >= place
        return trained, place + 1, jnp.where(later, jnp.full_like(means, values.mean()), means)

    def goes_on(carry: tuple[PyTree, Array, Array]) -> Array:
        _, place, means = carry
        return (place < len(means)) & ~(means[-1] < STOP)

    start = (raw, tx.init(raw)), jnp.zeros((), jnp.int32), jnp.full(steps // CHUNK, jnp.inf)
    (raw, _), _, means = jax.lax.while_loop(goes_on, chunk, start)
    return raw, means


def cell(method: Method, units: int, blanks: int, rate: float, steps: int) -> Cell:
    """One setting, seed after seed, as each stops when it may."""

    def run(key: Array) -> dict[str, Array]:
        raw, means = losses(method, units, blanks, rate, steps, key)
        left = means < LEFT
        first = jnp.where(left.any(), jnp.argmax(left) + 1, len(means) + 1)
        return {
            "loss": means,
            "steps": first * CHUNK,
            "trained": jnp.asarray(sum(x.size for x in jax.tree.leaves(rpx.partition(raw)[0]))),
        }

    return jax.jit(lambda keys: jax.lax.map(run, keys))


def cells(size: Size) -> dict[str, Cell]:
    """Each method, number of blanks and rate; one short task and one rate at tiny size."""
    steps = {10: 40} if size.tiny else STEPS
    return {
        f"{name}, T = {blanks}, rate {rate:g}": cell(method, size(*method.units), blanks, rate, most)
        for blanks, most in steps.items()
        for name, method in METHODS.items()
        for rate in method.rates[-1 if size.tiny else 0 :]
    }


class Chosen(NamedTuple):
    """The best rate of one method for one number of blanks, and what it gave."""

    method: str
    blanks: int
    rate: str
    loss: np.ndarray
    steps: np.ndarray
    trained: int

    @property
    def most(self) -> int:
        """The steps after which a run was cut."""
        return self.loss.shape[1] * CHUNK

    @property
    def is_cut(self) -> np.ndarray:
        """Whether a seed did not leave the baseline."""
        return self.steps > self.most

    @property
    def at_least(self) -> np.ndarray:
        """Steps, where a run that was cut counts as long as it was."""
        return np.minimum(self.steps, self.most)

    def told(self) -> str:
        """The steps, or how many runs were cut."""
        if self.is_cut.all():
            return f"more than {self.most}"
        cut = f", {self.is_cut.sum()} of {len(self.steps)} cut" if self.is_cut.any() else ""
        return f"{'at least ' if cut else ''}{told(self.at_least, 0)}{cut}"


def chosen(found: Found) -> dict[int, dict[str, Chosen]]:
    """By blanks and method the rate of the fewest steps, and of equal ones that of the lowest last loss."""
    best: dict[int, dict[str, Chosen]] = {}
    for name, values in found.items():
        method, blanks, rate = (part.split()[-1] for part in name.split(", "))
        now = Chosen(method, int(blanks), rate, values["loss"], values["steps"], int(values["trained"][0]))
        of_blanks = best.setdefault(now.blanks, {})
        of_blanks[method] = min(now, of_blanks.get(method, now), key=_order)
    return best


def _order(one: Chosen) -> tuple[float, float]:
    return float(one.at_least.mean()), float(one.loss[:, -1].mean())


def table(found: Found) -> str:
    """Steps for each task and method."""
    head = ["T", "method", "numbers trained", "best rate", "steps to leave the baseline", "last loss / baseline"]
    return markdown(
        head,
        (
            [str(each.blanks), each.method, str(each.trained), each.rate, each.told(), told(each.loss[:, -1], 2)]
            for methods in chosen(found).values()
            for each in methods.values()
        ),
    )


COLOURS = {"orthogonal": "#B84F00", "LSTM": "#0072B2"}


def picture(found: Found) -> Figure:
    """The losses of all seeds at the best rates, a panel for each task."""
    best = chosen(found)
    figure = Figure(figsize=(7.8, 3.2), layout="constrained")
    panels = figure.subplots(1, len(best), sharey=True, squeeze=False)[0]
    for axes, (blanks, methods) in zip(panels, best.items(), strict=True):
        for each in methods.values():
            _draw(axes, each)
        axes.axhline(1, color="#000000", linestyle="--", linewidth=1)
        axes.set(title=f"T = {blanks}", xlabel="training step", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("loss / baseline")
    figure.suptitle("Copying: one line for each seed; dashed is the loss without memory", fontsize=10)
    return figure


def _draw(axes: Any, each: Chosen) -> None:
    """A line for each seed up to where it stopped."""
    for i, losses in enumerate(each.loss):
        stopped = losses < STOP
        shown = losses[: stopped.argmax() + 1 if stopped.any() else len(losses)]
        label = f"{each.method}, rate {each.rate}" if i == 0 else None
        steps = CHUNK * np.arange(1, len(shown) + 1)
        axes.plot(steps, shown, color=COLOURS[each.method], linewidth=1, alpha=0.8, label=label)


def verdict(found: Found) -> str:
    """For how many gaps the orthogonal network learns sooner."""
    best = chosen(found)
    sooner = [
        blanks
        for blanks, methods in best.items()
        if difference(methods["orthogonal"].at_least, methods["LSTM"].at_least).word == "lower"
    ]
    return (
        f"The orthogonal network learns to copy sooner than an LSTM of its size for {len(sooner)} of {len(best)} gaps."
    )


def sentence(found: Found) -> str:
    """Who leaves the baseline, and when."""
    best = chosen(found)
    parts = [_at(blanks, methods["orthogonal"], methods["LSTM"]) for blanks, methods in best.items()]
    return f"Steps to leave the baseline: {'; '.join(parts)}."


def _at(blanks: int, orthogonal: Chosen, lstm: Chosen) -> str:
    both = f"{orthogonal.told()} (orthogonal, rate {orthogonal.rate}) and {lstm.told()} (LSTM, rate {lstm.rate})"
    gap = difference(orthogonal.at_least, lstm.at_least)
    verdict = {"higher": "the LSTM is sooner", "lower": "the orthogonal network is sooner"}
    return f"at T = {blanks} {both}, {verdict.get(gap.word, gap.word)} (p = {gap.p:.2g})"
