"""What is compared, and how: the one place of all numbers that the table, the demo and the page share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jax import Array

import reparax as rpx
from examples.speech.features import Masks

Chain = Callable[[Array | float, str], rpx.Parametrization]
"""From the value of what a way tunes, and the body of the recognizer, to the chain."""


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
      tunes: What of it is tuned on development voices: the learning rate, or what it adds.
      grid: The values that are tried. Where the best one is at an edge, one more is tried beside it, by a factor of 2.
      base: The way whose learning rate it has, where it does not tune its own.
      against: The way that it is compared with.
      masks: Whether its frames have SpecAugment.
      chain: What its weights go through, from a third of the steps on.
    """

    tunes: str
    grid: tuple[float, ...]
    base: str = ""
    against: str = ""
    masks: bool = False
    chain: Chain = lambda value, body: rpx.Chain()


@dataclass(frozen=True)
class Settings:
    """Everything that a recognizer of drawn voices is made and tested with.

    Attributes:
      steps: Of training.
      start: The first step that has noise or dropout of weights.
      batch: Utterances in a step.
      utterances: In training, by ``voices`` voices.
      voices: Of training.
      unseen: Voices of the test.
      development: Voices that values are chosen by.
      each: Strings that each voice of a test says.
      decibels: Of speech over noise in training, drawn for each utterance of each step.
      levels: The same in tests.
      buckets: Seconds: an utterance has the length of the first bucket that is long enough, and a program is compiled
        for each.
      selections: Replicates that values are chosen by; they have voices and strings of their own.
      replicates: Of the comparison: every one draws its voices, strings, weights and batches, and all ways share them.
      more: How many there are if a difference has more than ``spread`` points of standard deviation after ``look``.
      ways: What is compared, in the order of ``WAYS``.
    """

    steps: int = 1500
    start: int = 500
    batch: int = 16
    utterances: int = 400
    voices: int = 12
    unseen: int = 48
    development: int = 32
    each: int = 12
    decibels: tuple[float, float] = (5.0, 20.0)
    levels: tuple[int, ...] = (0, 5, 10)
    buckets: tuple[float, ...] = (1.5, 2.0, 3.0)
    masks: Masks = field(default_factory=Masks)
    selections: int = 3
    replicates: int = 10
    look: int = 5
    spread: float = 1.1
    more: int = 16
    ways: tuple[str, ...] = field(default_factory=lambda: tuple(WAYS))


RATES, STDS, DROPPED, DECAYS = (5e-4, 1e-3, 2e-3), (0.01, 0.02, 0.04), (0.05, 0.1, 0.2), (1e-3, 1e-2, 1e-1)
RECURRENT, OF_BLOCKS = ".*/h[ifgo]/kernel", ".*conformer_.*/kernel"
"""Where weight dropout acts: on recurrent kernels, and in a conformer, which has none, on the kernels of its blocks."""
NORMS = {"conformer": {".*/(query|key|value)/kernel": (-2, -1), r"(?!.*/(query|key|value)/).*": -1}}
"""Axes of lengths of a body whose kernels have several axes of outputs."""


def noise(std: Array | float, body: str) -> rpx.Parametrization:
    """Variational noise on all weights."""
    del body
    return rpx.VarNoise(std)


def dropout(rate: Array | float, body: str) -> rpx.Parametrization:
    """Dropout of recurrent weights alone."""
    return rpx.WeightDropout(rate, where=OF_BLOCKS if body == "conformer" else RECURRENT)


def normed_noise(std: Array | float, body: str) -> rpx.Parametrization:
    """Noise on weights that have a length for each output."""
    return rpx.WeightNorm(axis=NORMS.get(body, -1)) >> rpx.VarNoise(std)


WAYS = {
    "plain": Way("learning rate", RATES),
    "SpecAugment": Way("learning rate", RATES, against="plain", masks=True),
    "weight decay": Way("decay", DECAYS, "plain", "plain"),
    "weight noise": Way("noise", STDS, "plain", "plain", chain=noise),
    "weight dropout": Way("dropout", DROPPED, "plain", "plain", chain=dropout),
    "SpecAugment, noise": Way("noise", STDS, "SpecAugment", "SpecAugment", masks=True, chain=noise),
    "SpecAugment, noise, weight norm": Way(
        "noise", STDS, "SpecAugment", "SpecAugment, noise", masks=True, chain=normed_noise
    ),
}
"""In the order in which they are run, as all others have the learning rate of one of the first two."""
SETTINGS = Settings()
FEWER = Settings(replicates=5, more=5, ways=("plain", "SpecAugment", "weight noise", "SpecAugment, noise"))
"""Of a second recognizer: decided before any of it was trained."""
TABLES = {"digits_lstm": SETTINGS, "digits_attention": FEWER}
"""The name of each comparison ends with the body of its recognizer."""
