"""What is drawn for a replicate: voices, strings and noise, spoken where this runs.

Run: python -m examples.speech.replicates. It puts the families of the voices that espeak-ng ships on file.
"""

import functools
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.cluster import hierarchy

from examples.speech import features, voices
from examples.speech.features import Speech
from examples.speech.protocol import RESULTS
from examples.speech.settings import Settings

ALIKE = 0.98
"""The mean correlation between the spectra of two families that are one."""


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


def families(names: Sequence[str]) -> list[int]:
    """The family of each voice, from zero on: many variants of espeak-ng are little else than another one.

    The mean log-mel spectra of the ten digits are clustered by their correlation, in average linkage.
    """
    said = [of_power_one(each) for each in voices.speak([(" ".join(voices.WORDS), name, 170, 50) for name in names])]
    spectra = [np.asarray(features.log_mel(each)).mean(0) for each in said]
    apart = 1 - np.corrcoef(spectra)[np.triu_indices(len(names), 1)]
    found = hierarchy.fcluster(hierarchy.linkage(apart, "average"), 1 - ALIKE, "distance")
    return [int(each) - 1 for each in found]


def main() -> None:
    """Speaks, and writes."""
    names = voices.named_voices()
    told = dict(zip(names, families(names), strict=True))
    (RESULTS / "families.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
