"""Log-mel spectrograms, in JAX: how loud each of forty bands is in each of a hundred frames a second."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from examples.speech.voices import SAMPLES_PER_SECOND, SECONDS, Utterance, noisy, utterances

BANDS, WINDOW, HOP = 40, 512, 220
SAMPLES = int(SECONDS * SAMPLES_PER_SECOND)
FRAMES, LABELS = 1 + (SAMPLES - WINDOW) // HOP, 7
LOW, HIGH = 60.0, SAMPLES_PER_SECOND / 2


class Batch(NamedTuple):
    """Utterances of one length: what is padding has a one in the arrays of padding. Label zero is CTC's blank."""

    frames: np.ndarray
    padding: np.ndarray
    labels: np.ndarray
    label_padding: np.ndarray

    def rows(self, index: np.ndarray | slice) -> "Batch":
        """Some of the utterances."""
        return Batch(*(each[index] for each in self))


def band_edges() -> np.ndarray:
    """In hertz: each band is a triangle over three of them, and they are equally far apart in mel."""
    low, high = 2595 * np.log10(1 + np.array([LOW, HIGH]) / 700)
    return 700 * (10 ** (np.linspace(low, high, BANDS + 2) / 2595) - 1)


def mel_filters() -> np.ndarray:
    """The share of each frequency of a window in each band."""
    edges, hertz = band_edges(), np.fft.rfftfreq(WINDOW, 1 / SAMPLES_PER_SECOND)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    return np.maximum(0, np.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)))


@jax.jit
def log_mel(samples: Array) -> Array:
    """Of samples ``(..., time)``, frames of ``(..., time / HOP, BANDS)``."""
    starts = jnp.arange(0, samples.shape[-1] - WINDOW + 1, HOP)
    frames = samples[..., starts[:, None] + jnp.arange(WINDOW)] * np.hanning(WINDOW).astype(np.float32)
    power = jnp.abs(jnp.fft.rfft(frames)) ** 2
    return jnp.log(power @ mel_filters().astype(np.float32) + 1e-3)


def batch(spoken: list[Utterance], decibels: tuple[float, float], seed: int) -> Batch:
    """Features of utterances in noise between two levels, where each band has mean zero and variance one."""
    drawn, count = np.random.default_rng(seed), len(spoken)
    made = Batch(
        np.zeros((count, FRAMES, BANDS), np.float32),
        np.ones((count, FRAMES), np.float32),
        np.zeros((count, LABELS), np.int32),
        np.ones((count, LABELS), np.float32),
    )
    for i, (samples, words) in enumerate(spoken):
        padded = np.zeros(SAMPLES, np.float32)
        padded[: len(samples)] = noisy(samples, drawn.uniform(*decibels), drawn)
        length = 1 + (len(samples) - WINDOW) // HOP
        frames = np.asarray(log_mel(padded))[:length]
        made.frames[i, :length] = (frames - frames.mean(0)) / (frames.std(0) + 1e-3)
        made.padding[i, :length] = 0
        made.labels[i, : len(words)], made.label_padding[i, : len(words)] = words + 1, 0
    return made


@functools.cache
def corpus(task: str, group: str, count: int, decibels: tuple[float, float], seed: int) -> Batch:
    """What a group of voices says, in noise."""
    return batch(utterances(task, group, count, seed), decibels, seed)


def tests(task: str, count: int) -> dict[tuple[str, int], Batch]:
    """Other strings by voices of training and by unseen ones, in noise of three levels: 10 decibels are the least."""
    groups = {"seen": "training", "unseen": "unseen"}
    return {
        (told, level): corpus(task, group, count, (level, level), seed=1)
        for told, group in groups.items()
        for level in (0, 5, 10)
    }
