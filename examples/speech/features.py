"""From samples to what a recognizer reads, in JAX and so inside of a step: noise, log-mel bands, SpecAugment."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from examples.speech.voices import SAMPLES_PER_SECOND

BANDS, WINDOW, HOP = 40, 400, 160
LOW, HIGH = 60.0, SAMPLES_PER_SECOND / 2
POOL = 60 * SAMPLES_PER_SECOND
"""Samples of white noise of which a step takes spans: to draw new ones would take longer than all else in features."""


class Speech(NamedTuple):
    """Samples ``(utterances, time)`` of power one and their lengths; labels, from one on, padded by zeros."""

    samples: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray

    def rows(self, index: np.ndarray, seconds: float) -> "Speech":
        """Some of them, none of which lasts longer than this."""
        return Speech(self.samples[index, : int(seconds * SAMPLES_PER_SECOND)], self.lengths[index], self.labels[index])


class Masks(NamedTuple):
    """How much SpecAugment hides of each utterance: so many spans, of at most so many bands and frames.

    None of the spans of frames is longer than ``share`` of the utterance.
    """

    of_bands: int = 2
    bands: int = 10
    of_frames: int = 2
    frames: int = 25
    share: float = 0.2


def speech(samples: list[np.ndarray], labels: list[np.ndarray]) -> Speech:
    """Utterances in one array, in half precision, as there are many."""
    longest, most = max(map(len, samples)), max(map(len, labels))
    made = Speech(
        np.zeros((len(samples), longest), np.float16),
        np.array([len(each) for each in samples], np.int32),
        np.zeros((len(samples), most), np.int32),
    )
    for i, (sound, label) in enumerate(zip(samples, labels, strict=True)):
        made.samples[i, : len(sound)] = sound
        made.labels[i, : len(label)] = label
    return made


def band_edges() -> np.ndarray:
    """In hertz: each band is a triangle over three of them, and they are equally far apart in mel."""
    low, high = 2595 * np.log10(1 + np.array([LOW, HIGH]) / 700)
    return 700 * (10 ** (np.linspace(low, high, BANDS + 2) / 2595) - 1)


def mel_filters() -> np.ndarray:
    """The share of each frequency of a window in each band."""
    edges, hertz = band_edges(), np.fft.rfftfreq(WINDOW, 1 / SAMPLES_PER_SECOND)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    return np.maximum(0, np.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)))


def log_mel(samples: Array) -> Array:
    """Of samples ``(..., time)`` of power one, frames of ``(..., time / HOP, BANDS)``."""
    starts = jnp.arange(0, samples.shape[-1] - WINDOW + 1, HOP)
    frames = samples[..., starts[:, None] + jnp.arange(WINDOW)] * np.hanning(WINDOW).astype(np.float32)
    power = jnp.abs(jnp.fft.rfft(frames)) ** 2
    return jnp.log(power @ mel_filters().astype(np.float32) + 1e-3)


def frames_of(lengths: Array) -> Array:
    """How many frames utterances of so many samples have."""
    return 1 + (lengths - WINDOW) // HOP


def frames(samples: Array, lengths: Array) -> tuple[Array, Array]:
    """Frames of utterances, where each band has mean zero and variance one, and their padding, which has ones."""
    found = log_mel(samples.astype(jnp.float32))
    count = frames_of(lengths)[:, None, None]
    real = jnp.arange(found.shape[1])[:, None] < count
    mean = jnp.sum(found, axis=1, where=real, keepdims=True) / count
    variance = jnp.sum((found - mean) ** 2, axis=1, where=real, keepdims=True) / count
    return jnp.where(real, (found - mean) / (jnp.sqrt(variance) + 1e-3), 0.0), 1.0 - real[..., 0]


def in_room(key: Array, samples: Array, lengths: Array, decibels: tuple[float, float], pool: Array) -> Array:
    """Speech with white noise, a random span of the pool, so many decibels below it."""
    for_level, for_place = jax.random.split(key)
    level = jax.random.uniform(for_level, (len(samples), 1), minval=decibels[0], maxval=decibels[1])
    places = jax.random.randint(for_place, (len(samples),), 0, len(pool) - samples.shape[1])
    noise = jax.vmap(lambda place: jax.lax.dynamic_slice(pool, (place,), samples.shape[1:]))(places)
    real = jnp.arange(samples.shape[1]) < lengths[:, None]
    return samples + jnp.where(real, 10 ** (-level / 20) * noise, 0.0)


def masked(key: Array, frames: Array, padding: Array, masks: Masks) -> Array:
    """SpecAugment: spans of bands and of frames are set to zero, which is their mean (Park et al., 2019)."""
    for_bands, for_frames = jax.random.split(key)
    length = jnp.sum(1 - padding, axis=1)[:, None]
    most = jnp.minimum(masks.frames, jnp.floor(masks.share * length))
    hidden = spans(for_bands, (len(frames), masks.of_bands), masks.bands, BANDS, BANDS)[:, None, :]
    cut = spans(for_frames, (len(frames), masks.of_frames), most, length, frames.shape[1])[:, :, None]
    return jnp.where(hidden | cut, 0.0, frames)


def spans(key: Array, shape: tuple[int, int], most: Array | int, within: Array | int, size: int) -> Array:
    """Whether each of ``size`` places is in one of ``shape[1]`` spans, of lengths from zero to ``most``."""
    of_lengths, of_starts = jax.random.split(key)
    lengths = jnp.floor(jax.random.uniform(of_lengths, shape) * (most + 1))
    starts = jnp.floor(jax.random.uniform(of_starts, shape) * (within - lengths + 1))
    at = jnp.arange(size)
    return jnp.any((at >= starts[..., None]) & (at < (starts + lengths)[..., None]), axis=1)
