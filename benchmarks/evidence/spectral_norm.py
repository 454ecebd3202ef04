"""Spectral norm steadies the training of a GAN.

Miyato, Kataoka, Koyama and Yoshida, *Spectral Normalization for Generative Adversarial Networks*, 2018, arXiv
1802.05957.

What was tried: with momentum 0.5 and one turn spectral norm was worse, also with other losses and scales of the data.
The two other setups were added then.

Protocol:
Data: 8 Gaussians of standard deviation 0.1 on a ring of radius 2. Generator (8-64-64-2) and discriminator (2-64-64-1),
the latter plain or with each kernel under spectral norm; Adam, 2000 steps of the generator, batches of 64. Each has 15
settings: 5 learning rates in 3 setups, each a momentum and a number of discriminator updates per generator update. The
best has most coverage in runs of other seeds: good samples, at most an eighth for each mode. 5 seeds. Measure: 2000
samples, 5 times in the second half. Good: within 0.3 of a centre. A mode is found by 1 % of the samples.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure
from scipy import stats

import reparax as rpx
from benchmarks.evidence.digit_nets import Params, logits, mlp
from benchmarks.evidence.record import Cell, Found, Size, over_settings
from benchmarks.evidence.summary import best, difference, markdown, told

PyTree = Any

MODES, RADIUS, STD = 8, 2.0, 0.1
NOISE, BATCH, SAMPLES = 8, 64, 2000
STEPS, LOOKS = 2000, 10
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)
GAMES = {"momentum 0, 1 turn": (0.0, 1), "momentum 0.5, 1 turn": (0.5, 1), "momentum 0.5, 5 turns": (0.5, 5)}
"""Adam's momentum, and how often the discriminator moves before the generator does."""
METHODS = {"plain": rpx.Chain(), "spectral norm": rpx.SpectralNorm()}
STYLES = {"plain": ("#0072B2", "o--"), "spectral norm": ("#B84F00", "^-")}
MEASURES = {"modes": "modes of 8", "good samples": "good samples (%)", "coverage": "coverage (%)"}


def cells(size: Size) -> dict[str, Cell]:
    """One for each method, game and learning rate."""
    found = {}
    for method, p in METHODS.items():
        trained = over_settings(training(p, size))
        for game in list(GAMES)[: size(len(GAMES), 1)]:
            for rate in RATES[: size(len(RATES), 2)]:
                found[named(method, game, rate)] = trained(rate, *GAMES[game])
    return found


def named(method: str, game: str, rate: float) -> str:
    """The name of a cell."""
    return f"{method}, {game}, rate {rate}"


def training(p: rpx.Parametrization, size: Size) -> Callable[[Array, Array, Array, Array], dict[str, Array]]:
    """Trains and measures, from the key of a seed, a learning rate, and both parts of a game."""

    def twice(key: Array, rate: Array, momentum: Array, turns: Array) -> dict[str, Array]:
        tx = rpx.optimizer(optax.adam(rate, b1=momentum, b2=0.9), updates="by hand")
        both = jax.vmap(lambda key: once(p, key, tx, turns.astype(jnp.int32), size))(jax.random.split(key))
        numbers = {what: values[0] for what, values in both.items()}
        return numbers | {"coverage of another seed": both["coverage"][1]}

    return twice


def centres() -> Array:
    """The means of the mixture."""
    angles = jnp.arange(MODES, dtype=jnp.float32) * (2 * np.pi / MODES)
    return RADIUS * jnp.stack([jnp.cos(angles), jnp.sin(angles)], -1)


def real(key: Array) -> Array:
    """A batch of the mixture."""
    of_mode, of_place = jax.random.split(key)
    return centres()[jax.random.randint(of_mode, (BATCH,), 0, MODES)] + STD * jax.random.normal(of_place, (BATCH, 2))


def fake(generator: Params, key: Array, number: int = BATCH) -> Array:
    """What the generator makes of noise."""
    return logits(generator, jax.random.normal(key, (number, NOISE)))


class Players(NamedTuple):
    """Both networks, the discriminator as a raw tree, and the states of their optimizers."""

    generator: Params
    raw: PyTree
    of_generator: PyTree
    of_raw: PyTree


def once(p: rpx.Parametrization, key: Array, tx: Any, turns: Array, size: Size) -> dict[str, Array]:
    """Trains both networks, and takes the mean of what samples are like over the second half of the steps."""
    hidden = [size(64, 8)] * size(2, 1)
    key_generator, key_discriminator, key_fit = jax.random.split(key, 3)
    generator = mlp(key_generator, (NOISE, *hidden, 2))
    raw = p.init(mlp(key_discriminator, (2, *hidden, 1)), key_discriminator)

    def step(players: Players, key: Array) -> tuple[Players, None]:
        key_turns, key_fake = jax.random.split(key)
        players = jax.lax.fori_loop(
            0, turns, lambda i, players: discriminator_moved(p, tx, players, jax.random.fold_in(key_turns, i)), players
        )
        return generator_moved(p, tx, players, key_fake), None

    def part(players: Players, keys: Array) -> tuple[Players, dict[str, Array]]:
        players, _ = jax.lax.scan(step, players, keys)
        return players, measured(fake(players.generator, keys[0], size(SAMPLES, 100)))

    keys = jax.random.split(key_fit, (LOOKS, size(STEPS, LOOKS) // LOOKS))
    _, looks = jax.lax.scan(part, Players(generator, raw, tx.init(generator), tx.init(raw)), keys)
    return {what: values[LOOKS // 2 :].mean() for what, values in looks.items()}


def discriminator_moved(p: rpx.Parametrization, tx: Any, players: Players, key: Array) -> Players:
    """A turn of the discriminator, and a step of the power iteration, where there is one."""
    key_real, key_fake = jax.random.split(key)
    batches = real(key_real), fake(players.generator, key_fake)
    grads = jax.grad(lambda raw: told_apart(p.apply(raw), *batches))(players.raw)
    raw, state = moved(tx, grads, players.of_raw, players.raw)
    return players._replace(raw=p.update(raw), of_raw=state)


def generator_moved(p: rpx.Parametrization, tx: Any, players: Players, key: Array) -> Players:
    """A turn of the generator."""
    discriminator = p.apply(players.raw)
    grads = jax.grad(lambda generator: taken_for_fake(discriminator, fake(generator, key)))(players.generator)
    generator, state = moved(tx, grads, players.of_generator, players.generator)
    return players._replace(generator=generator, of_generator=state)


def moved(tx: Any, grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """The parameters after a step of the optimizer, and its state."""
    with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
        updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def told_apart(discriminator: Params, real: Array, fake: Array) -> Array:
    """The discriminator's loss: real rows should get large logits, and others small ones."""
    return taken_for_fake(discriminator, real) + jax.nn.softplus(judged(discriminator, fake)).mean()


def taken_for_fake(discriminator: Params, x: Array) -> Array:
    """The generator's loss: its rows should get large logits."""
    return jax.nn.softplus(-judged(discriminator, x)).mean()


def judged(discriminator: Params, x: Array) -> Array:
    """A logit for each row, with the paper's nonlinearity."""
    return logits(discriminator, x, partial(jax.nn.leaky_relu, negative_slope=0.1))


def measured(samples: Array) -> dict[str, Array]:
    """Modes found, and the shares of good samples and of what they cover, in percent."""
    away = jnp.linalg.norm(samples[:, None] - centres()[None], axis=-1)
    shares = jnp.mean(away < 3 * STD, 0, dtype=jnp.float32)  # a sample is near one centre at most
    return {
        "modes": jnp.sum(shares >= 0.01, dtype=jnp.float32),
        "good samples": 100 * shares.sum(),
        "coverage": 100 * jnp.minimum(shares, 1 / MODES).sum(),
    }


def tried(found: Found, method: str, game: str) -> dict[float, str]:
    """The cells of a method and a game, by learning rate."""
    cells = {rate: named(method, game, rate) for rate in RATES}
    return {rate: name for rate, name in cells.items() if name in found}


def games(found: Found) -> list[str]:
    """Those on file."""
    return [game for game in GAMES if tried(found, "plain", game)]


def chosen(found: Found, method: str) -> str:
    """The cell that covers most, in runs of other seeds."""
    names = [name for game in games(found) for name in tried(found, method, game).values()]
    return best(found, names, "coverage of another seed")


def over_rates(found: Found, method: str, game: str, what: str) -> np.ndarray:
    """The mean over the learning rates, for each seed."""
    return np.mean([found[name][what] for name in tried(found, method, game).values()], 0)


def setting(name: str) -> str:
    """The setting that the name of a cell says."""
    return name.partition(", ")[2]


def table(found: Found) -> str:
    """Each method at its best, and its mean over the learning rates in each game."""
    rows = []
    for method in METHODS:
        name = chosen(found, method)
        rows.append([method, f"best: {setting(name)}", *(told(found[name][what]) for what in MEASURES)])
        for game in games(found):
            means = (told(over_rates(found, method, game, what)) for what in MEASURES)
            rows.append([method, f"mean over rates: {game}", *means])
    return markdown(["discriminator", "setting", *MEASURES.values()], rows)


def picture(found: Found) -> Figure:
    """Modes above and good samples below, against the learning rate, a column for each game."""
    figure = Figure(figsize=(7.8, 5.2), layout="constrained")
    panels = figure.subplots(2, len(games(found)), sharex=True, sharey="row", squeeze=False)
    for column, game in zip(panels.T, games(found), strict=True):
        for axes, what in zip(column, ("modes", "good samples"), strict=True):
            for method, (colour, style) in STYLES.items():
                cells = tried(found, method, game)
                values = np.array([found[name][what] for name in cells.values()])
                errors = stats.sem(values, axis=1)
                axes.errorbar(list(cells), values.mean(1), errors, fmt=style, color=colour, label=method, markersize=5)
            axes.set(xscale="log")
            axes.grid(alpha=0.3)
        column[0].set_title(game, fontsize=10)
        column[1].set(xlabel="learning rate")
    panels[0, 0].set(ylabel=f"modes found, of {MODES}", ylim=(0, MODES + 0.5))
    panels[1, 0].set(ylabel="good samples (%)", ylim=(0, 100))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def verdict(found: Found) -> str:
    """In how many setups spectral norm finds more modes, and in how many fewer."""
    names = games(found)
    words = [
        difference(*(over_rates(found, method, game, "modes") for method in ("spectral norm", "plain"))).word
        for game in names
    ]
    return (
        f"Over all learning rates, spectral norm finds more modes in {words.count('higher')} of {len(names)} setups, "
        f"and fewer in {words.count('lower')}."
    )


def sentence(found: Found) -> str:
    """Each method at its best, then all learning rates together, in each game."""
    normed, plain = chosen(found, "spectral norm"), chosen(found, "plain")
    modes, good = ([found[name][what] for name in (normed, plain)] for what in ("modes", "good samples"))
    parts = [
        f"{against(*(over_rates(found, method, game, 'modes') for method in ('spectral norm', 'plain')))} with {game}"
        for game in games(found)
    ]
    return (
        f"At its best setting ({setting(normed)}) spectral norm finds {against(*modes)} of {MODES} modes, and "
        f"{against(*good)} % of its samples are good; the plain network's best setting is {setting(plain)}. "
        f"In the mean over all learning rates it finds {'; '.join(parts)}."
    )


def against(normed: np.ndarray, plain: np.ndarray) -> str:
    """Two numbers, and which is more."""
    gap = difference(normed, plain).word
    word = {"higher": "more", "lower": "fewer"}.get(gap, gap)
    return f"{told(normed)} (plain {told(plain)}, {word})"
