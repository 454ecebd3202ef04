"""Weight noise on handwritten digits: ``python -m reparax.demo`` trains, prints a table and draws a plot.

A small network learns scikit-learn's digits from 300 images, once for each of five parametrizations. Its weights are
then perturbed, by noise and by rounding them to eight values, to see how well it still reads the other 1497 images.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import reparax as rpx

try:
    import optax
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    DIGITS = distribution("scikit-learn")
except ModuleNotFoundError as error:  # PackageNotFoundError is one
    raise SystemExit(f"The demo needs {error.name}. Install it with: pip install 'reparax[demo]'") from error

PyTree = Any
Track = Callable[[Sequence[int]], Iterable[int]]

CHAINS = (rpx.WeightNorm(), rpx.VarNoise(0.075), rpx.WeightDropout(0.3), rpx.WeightNorm() >> rpx.VarNoise(0.075))
CONFIGURATIONS: Mapping[str, rpx.Parametrization] = {"plain": rpx.Chain()} | {repr(p): p for p in CHAINS}

SIZES = (64, 128, 128, 10)  # of the images, of two hidden layers, and of the logits
OPTIMIZER = rpx.optimizer(optax.adam(6e-3))
BATCH = 64
CHUNK = 50  # steps between updates of the progress bar

STDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
TABLE_STD = 0.2
DRAWS = 8
BITS = 3

# The palette of Okabe and Ito, which colour-blind readers can tell apart, dark enough for text on white.
STYLES = (("#000000", "o-"), ("#0072B2", "s--"), ("#B84F00", "^-"), ("#007A58", "D-."), ("#A34F80", "v--"))


class Digits(NamedTuple):
    """Images as rows of 64 numbers between 0 and 1, and the digits that they show."""

    images: Array
    labels: Array


class Steps(NamedTuple):
    """A key for the weights and the rows of a minibatch, for each seed and each step."""

    keys: Array
    rows: Array


class State(NamedTuple):
    """What a training step changes."""

    raw: PyTree
    moments: PyTree


class Scores(NamedTuple):
    """Accuracy in percent for each seed, ``perturbed`` with a column for each of ``STDS``."""

    perturbed: Array
    quantized: Array


class EvenlySpaced(rpx.Perturbation):
    """Matrices rounded to ``2**bits`` evenly spaced values from ``-m`` to ``m``, m their largest magnitude."""

    bits: int
    stochastic = False
    min_ndim = 2

    def apply_leaf(self, w: Array, key: Array | None) -> Array:
        """The rounded matrix."""
        del key
        max_abs, n_steps = jnp.max(jnp.abs(w)), 2**self.bits - 1
        share = w / jnp.where(max_abs == 0, 1, max_abs)
        return max_abs * (2 / n_steps * jnp.round((share + 1) / 2 * n_steps) - 1)


def load(n: int = 300) -> tuple[Digits, Digits]:
    """The digits in a fixed random order, split into ``n`` training images and the rest."""
    file = DIGITS.locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",", dtype=np.float32)  # as sklearn does; its import takes seconds
    rows = np.random.default_rng(0).permutation(rows)
    images = jnp.asarray(rows[:, :-1] / 16)
    labels = jnp.asarray(rows[:, -1], jnp.int32)
    return Digits(images[:n], labels[:n]), Digits(images[n:], labels[n:])


def initial(key: Array) -> list[dict[str, Array]]:
    """A kernel and a bias for each layer."""
    shapes = list(itertools.pairwise(SIZES))
    kernels = map(jax.nn.initializers.lecun_normal(), jax.random.split(key, len(shapes)), shapes)
    return [{"kernel": kernel, "bias": jnp.zeros(kernel.shape[1])} for kernel in kernels]


def logits(params: Sequence[Mapping[str, Array]], images: Array) -> Array:
    """What the network says of each image, before the softmax."""
    *hidden, output_layer = params
    x = images
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"][None])
    return x @ output_layer["kernel"] + output_layer["bias"][None]


def loss(raw: PyTree, p: rpx.Parametrization, key: Array, batch: Digits) -> Array:
    """Cross-entropy of the model that reads the effective weights."""
    scores = logits(p.apply(raw, key), batch.images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch.labels).mean()


def draw(key: Array, seeds: int, steps: int, n: int) -> Steps:
    """What the steps of all configurations draw: minibatches out of ``n`` images, and keys for the weights."""
    weight_key, batch_key = jax.random.split(key)
    rows = jax.random.randint(batch_key, (seeds, steps, BATCH), 0, n)
    return Steps(jax.random.split(weight_key, (seeds, steps)), rows)


def step(p: rpx.Parametrization, data: Digits, state: State, inputs: Steps) -> State:
    """One step of the optimizer, with a new minibatch and new random numbers for the weights."""
    batch = Digits(data.images[inputs.rows], data.labels[inputs.rows])
    gradients = jax.grad(loss)(state.raw, p, inputs.keys, batch)
    with jax.numpy_dtype_promotion("standard"):  # optax.adam raises a float to an integer power
        updates, moments = OPTIMIZER.update(gradients, state.moments)
    return State(optax.apply_updates(state.raw, updates), moments)


@jax.jit
def start(p: rpx.Parametrization, params: PyTree) -> State:
    """The states before training, from parameters with a leading axis for the seeds."""

    def start_one(params: PyTree) -> State:
        raw = p.init(params)
        return State(raw, OPTIMIZER.init(raw))

    return jax.vmap(start_one)(params)


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})  # as compiling takes longer than training
def advance(p: rpx.Parametrization, data: Digits, states: State, inputs: Steps) -> State:
    """One training step for each column of ``inputs``; each state uses its own row."""

    def advance_one(state: State, own_inputs: Steps) -> State:
        return jax.lax.scan(lambda state, step_inputs: (step(p, data, state, step_inputs), None), state, own_inputs)[0]

    return jax.vmap(advance_one)(states, inputs)


def train(p: rpx.Parametrization, params: PyTree, data: Digits, inputs: Steps, track: Track = iter) -> PyTree:
    """Trains one model for each seed, side by side.

    Args:
      p: The parametrization of the models' weights.
      params: The initial parameters, with a leading axis for the seeds.
      data: The training images.
      inputs: A row for each seed and a column for each step.
      track: Wraps the loop over chunks of steps, for example in a progress bar.

    Returns:
      The trained parameters as plain weights, with the structure of ``params``.
    """
    states = start(p, params)
    for start_step in track(range(0, inputs.keys.shape[1], CHUNK)):
        chunk = Steps(inputs.keys[:, start_step : start_step + CHUNK], inputs.rows[:, start_step : start_step + CHUNK])
        states = jax.block_until_ready(advance(p, data, states, chunk))
    return jax.jit(jax.vmap(p.fold))(states.raw)


def accuracy(scores: Array, labels: Array) -> Array:
    """The share of rows, in percent, in which the label has the largest logit."""
    return 100 * jnp.mean(jnp.argmax(scores, axis=-1) == labels, dtype=jnp.float32)


def perturbed_accuracy(params: PyTree, std: float | Array, key: Array, data: Digits) -> Array:
    """Accuracy with noise on every weight and bias, averaged over ``DRAWS`` draws of it."""

    def accuracy_of_draw(key: Array) -> Array:
        return accuracy(logits(rpx.VarNoise(std).apply(params, key), data.images), data.labels)

    return jnp.mean(jax.lax.map(accuracy_of_draw, jax.random.split(key, DRAWS)))


def quantized_accuracy(params: PyTree, data: Digits) -> Array:
    """Accuracy with quantized kernels; biases are not quantized."""
    return accuracy(logits(EvenlySpaced(BITS).apply(params), data.images), data.labels)


@jax.jit
def evaluate(params: PyTree, keys: Array, data: Digits) -> Scores:
    """The scores of models stacked along a leading axis, each with its own key for the noise."""

    def evaluate_one(params: PyTree, key: Array) -> Scores:
        perturbed = jax.lax.map(lambda std: perturbed_accuracy(params, std, key, data), jnp.array(STDS))
        return Scores(perturbed, quantized_accuracy(params, data))

    return jax.lax.map(lambda pair: evaluate_one(*pair), (params, keys))


def columns(scores: Mapping[str, Scores]) -> dict[str, dict[str, Array]]:
    """The columns of the table: for each heading and configuration, an accuracy for each seed."""
    clean, noisy = STDS.index(0.0), STDS.index(TABLE_STD)
    return {
        "clean": {name: score.perturbed[:, clean] for name, score in scores.items()},
        "noisy": {name: score.perturbed[:, noisy] for name, score in scores.items()},
        f"{BITS}-bit": {name: score.quantized for name, score in scores.items()},
    }


def spread(values: Array) -> tuple[Array, Array]:
    """Mean and standard deviation over the seeds."""
    return jnp.mean(values, axis=0), jnp.std(values, axis=0, ddof=1)


def cell(values: Array) -> str:
    """Mean and standard deviation over the seeds as text."""
    mean, std = spread(values)
    return f"{mean:.1f} ± {std:.1f}"


def apart(a: Array, b: Array) -> bool:
    """Whether the intervals of mean ± standard deviation do not overlap."""
    (mean_a, std_a), (mean_b, std_b) = spread(a), spread(b)
    return bool(jnp.abs(mean_a - mean_b) > std_a + std_b)


def verdict(heading: str, column: Mapping[str, Array]) -> str:
    """A sentence on whether a column of the table differs from plain training."""
    plain = column["plain"]
    differing = [f"{name} ({cell(values)})" for name, values in column.items() if apart(values, plain)]
    difference = f"difference from plain ({cell(plain)}) beyond the spread over seeds"
    if not differing:
        return f"{heading.capitalize()} accuracy shows no {difference}."
    return f"{heading.capitalize()} accuracy shows a {difference}: {', '.join(differing)}."


def caption() -> str:
    """How the columns were measured."""
    return (
        f"noisy: N(0, {TABLE_STD}²) added to every weight and bias, mean of {DRAWS} draws. {BITS}-bit: each kernel "
        f"rounded to {2**BITS} evenly spaced values from -m to m, m its largest magnitude."
    )


def table(columns_shown: Mapping[str, Mapping[str, Array]]) -> Table:
    """A row for each configuration."""
    title = "Test accuracy in percent, mean ± standard deviation over the seeds"
    grid = Table("trained with", title=title, caption=caption(), caption_justify="left")
    for heading in columns_shown:
        grid.add_column(heading, justify="right")
    for name in CONFIGURATIONS:
        grid.add_row(name, *(cell(column[name]) for column in columns_shown.values()))
    return grid


def plot(scores: Mapping[str, Scores]) -> Figure:
    """Accuracy against the size of the noise, with a band of one standard deviation over the seeds."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for (name, row), (colour, style) in zip(scores.items(), STYLES, strict=True):
        mean, std = map(np.asarray, spread(row.perturbed))
        axes.plot(STDS, mean, style, color=colour, label=name, markersize=5)
        axes.fill_between(STDS, mean - std, mean + std, color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel="standard deviation of the noise on every weight and bias", ylabel="test accuracy in percent")
    axes.set_ylim(0, 100)
    axes.legend(title="trained with", alignment="left", frameon=False)
    axes.grid(alpha=0.3)
    return figure


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command-line options, checked before training starts."""
    parser = argparse.ArgumentParser(prog="python -m reparax.demo", description="Weight noise on handwritten digits.")
    parser.add_argument("--steps", type=int, default=400, help="training steps of each model (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=8, help="models of each configuration (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("demo.png"), help="PNG to write (default: %(default)s)")
    namespace = parser.parse_args(arguments)
    if namespace.steps < 1:
        parser.error(f"--steps must be at least 1, got {namespace.steps}.")
    if namespace.seeds < 2:
        parser.error(f"--seeds must be at least 2, for a standard deviation, got {namespace.seeds}.")
    if not namespace.plot.parent.is_dir():
        parser.error(f"--plot: there is no directory {str(namespace.plot.parent)!r}.")
    return namespace


def train_all(data: Digits, seeds: int, steps: int, progress: Progress) -> dict[str, PyTree]:
    """Trains every configuration, each from the same parameters and on the same minibatches.

    Two threads, as one compiles while the other trains.
    """
    init_key, step_key = jax.random.split(jax.random.key(0))
    params = jax.vmap(initial)(jax.random.split(init_key, seeds))
    inputs = draw(step_key, seeds, steps, len(data.labels))

    def train_one(name: str) -> PyTree:
        bar = partial(progress.track, description=f"{name:31}")
        return train(CONFIGURATIONS[name], params, data, inputs, bar)

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(CONFIGURATIONS, threads.map(train_one, CONFIGURATIONS), strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains every configuration, prints the table and what it shows, and writes the plot."""
    settings = options(arguments)
    console = Console(highlight=False)
    console.print(
        f"Networks learn to read handwritten digits from 300 images, with {len(CHAINS)} parametrizations of their "
        f"weights and with none. Then noise and rounding disturb the weights: who still reads the digits?"
    )
    training, test = load()
    began = time.perf_counter()
    with Progress(console=console) as progress:
        models = train_all(training, settings.seeds, settings.steps, progress)
    seconds = time.perf_counter() - began
    keys = jax.random.split(jax.random.key(1), settings.seeds)
    scores = {name: evaluate(params, keys, test) for name, params in models.items()}
    columns_shown = columns(scores)
    verdicts = (verdict(heading, column) for heading, column in columns_shown.items())
    console.print(table(columns_shown), *verdicts, sep="\n")
    console.print(f"{settings.seeds} seeds, {settings.steps} steps each, {seconds:.0f} seconds of training.")
    console.print("One small data set, and nothing is tuned: do not read this as a ranking of the methods.")
    plot(scores).savefig(settings.plot, format="png", dpi=150)
    console.print(f"Plot: {settings.plot}. Read next: docs/quickstart.md, which explains each line of such a training.")


if __name__ == "__main__":
    main()
