"""What is drawn for a replicate: voices, strings and noise, spoken where this runs."""

import functools
from typing import NamedTuple

import numpy as np

from examples.speech import features, voices
from examples.speech.features import Speech
from examples.speech.settings import Settings


class Heard(NamedTuple):
    """Utterances in noise of each level, and the place of the voice of each of them."""

    levels: dict[int, Speech]
    voices: np.ndarray


def of_power_one(samples: np.ndarray) -> np.ndarray:
    """As loud as the noise of zero decibels."""
    return samples / np.sqrt(np.mean(samples**2))


def heard(spoken: list[voices.Utterance], settings: Settings, drawn: np.random.Generator) -> Heard:
    """The same utterances at each level of noise, which differs."""
    samples = [of_power_one(each.samples) for each in spoken]
    labels = [each.words + 1 for each in spoken]
    levels = {
        level: features.speech(
            [each + drawn.standard_normal(len(each)) * 10 ** (-level / 20) for each in samples], labels
        )
        for level in settings.levels
    }
    return Heard(levels, np.array([each.voice for each in spoken]))


@functools.lru_cache(maxsize=4)
def training(replicate: int, settings: Settings) -> Speech:
    """What the voices of training say."""
    drawn = np.random.default_rng([replicate, 0])
    files = voices.drawn_voices(settings.voices, drawn)
    each = -(-settings.utterances // settings.voices)
    spoken = voices.utterances(files, each, drawn, files)
    drawn.shuffle(spoken)
    spoken = spoken[: settings.utterances]
    return features.speech([of_power_one(each.samples) for each in spoken], [each.words + 1 for each in spoken])


@functools.lru_cache(maxsize=4)
def unseen(replicate: int, count: int, settings: Settings) -> Heard:
    """Voices that are not in training."""
    drawn = np.random.default_rng([replicate, 1])
    files = voices.drawn_voices(count, drawn)
    return heard(voices.utterances(files, settings.each, drawn, files), settings, drawn)


@functools.lru_cache(maxsize=4)
def seen(replicate: int, settings: Settings) -> Heard:
    """Other strings by the voices of training."""
    files = voices.drawn_voices(settings.voices, np.random.default_rng([replicate, 0]))
    drawn = np.random.default_rng([replicate, 2])
    return heard(voices.utterances(files, settings.each, drawn, files), settings, drawn)


@functools.cache
def named(settings: Settings) -> Heard:
    """The voices that espeak-ng ships, which are no sample of anything: the same for all replicates."""
    drawn = np.random.default_rng(3)
    return heard(voices.utterances(voices.named_voices(), settings.each, drawn), settings, drawn)
