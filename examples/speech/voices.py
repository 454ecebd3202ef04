"""What is said, by whom, and in how much noise: strings of words, drawn with a seed and spoken where this runs."""

import base64
import functools
import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import numpy as np

PACKAGE, SPEAKER = "espeakng-loader", Path(__file__).with_name("speaker.py")
SAMPLES_PER_SECOND, SECONDS = 22050, 3.0
"""Longer utterances are left out, so that all fit into arrays of one length."""
INSTALL = f"Install it again with: pip install --force-reinstall {PACKAGE}"

TASKS = {
    "digits": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "words": tuple(start + end for start in "bhps" for end in ("ad", "at", "ed", "et", "it")),
}
"""The words of each task; those of the second differ in one sound."""

ACCENTS = ("en-US", "en", "en-029", "en-GB-scotland", "en-GB-x-rp", "en-GB-x-gbclan", "en-GB-x-gbcwmd")
VARIANTS = {
    "training": "m1 f1 Alex Annie Denis linda Gene f5 john grandma paul m7",
    "development": "m2 f2 Andy belinda Michael steph rob victor",
    "unseen": "m3 f3 Mike aunty david Storm boris Mario ed shelby zac quincy",
}


VOICES = {
    group: [f"{accent}+{variant}" for variant, accent in zip(variants.split(), itertools.cycle(ACCENTS), strict=False)]
    for group, variants in VARIANTS.items()
}
"""Three groups of voices, an accent and a speaker each; no speaker is in two groups."""


class Utterance(NamedTuple):
    """Samples between -1 and 1, and the words by their places in the list of the task."""

    samples: np.ndarray
    words: np.ndarray


@functools.cache
def utterances(task: str, group: str, count: int, seed: int) -> list[Utterance]:
    """Strings of three to seven words of a task, each by a voice of the group, at a rate and a pitch of its own."""
    drawn, voices = np.random.default_rng(seed), VOICES[group]
    strings, sentences = list[np.ndarray](), list[tuple[str, str, int, int]]()
    for _ in range(count + count // 5 + 5):
        words = drawn.integers(len(TASKS[task]), size=drawn.integers(3, 8))
        voice, rate, pitch = voices[drawn.integers(len(voices))], drawn.integers(130, 221), drawn.integers(30, 71)
        strings.append(words)
        sentences.append((" ".join(TASKS[task][i] for i in words), voice, int(rate), int(pitch)))
    said = map(Utterance, speak(sentences), strings)
    kept = [each for each in said if len(each.samples) <= SECONDS * SAMPLES_PER_SECOND][:count]
    if len(kept) < count:
        raise ValueError(
            f"{count} utterances of {task!r} were asked for, and only {len(kept)} of them last up to {SECONDS} s."
        )
    return kept


def noisy(samples: np.ndarray, decibels: float, drawn: np.random.Generator) -> np.ndarray:
    """Speech of power one, and white noise so many decibels below it."""
    noise = drawn.standard_normal(len(samples)) * 10 ** (-decibels / 20)
    return (samples / np.sqrt(np.mean(samples**2)) + noise).astype(np.float32)


def speak(sentences: list[tuple[str, str, int, int]]) -> list[np.ndarray]:
    """The samples of each ``(text, voice, rate, pitch)``: the same list gives the same samples."""
    check({voice for _, voice, _, _ in sentences})
    asked = json.dumps(sentences).encode()
    done = subprocess.run([sys.executable, str(SPEAKER)], input=asked, capture_output=True, check=False)
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip()[-500:] or f"the process ended with {done.returncode}"
        raise RuntimeError(f"espeak-ng failed to speak {len(sentences)} sentences: {told} {INSTALL}")
    head, samples = done.stdout.split(b"\n", 1)
    ends = np.cumsum(json.loads(head))[:-1]
    return [each.astype(np.float32) / 2**15 for each in np.split(np.frombuffer(samples, np.int16), ends)]


def check(voices: Iterable[str]) -> None:
    """Compares the files that these voices need with the checksums of the package.

    espeak-ng itself speaks on without a word: with the voice before, or with none.
    """
    try:
        files = {file.as_posix(): file for file in distribution(PACKAGE).files or ()}
    except PackageNotFoundError:
        raise RuntimeError(
            f"The speech of this example is made by the package {PACKAGE}, which is not installed. "
            f"Install it with: pip install {PACKAGE}"
        ) from None
    data = "espeakng_loader/espeak-ng-data/"
    needed = {data + name for name in ("phondata", "phonindex", "phontab", "intonations", "en_dict")}
    needed |= {name for name in files if name.endswith((".so", ".dylib", ".dll"))}
    for voice in sorted(voices):
        accent, _, variant = voice.partition("+")
        parts = {f"{data}lang/gmw/{accent}", f"{data}voices/!v/{variant}"}
        if not parts <= files.keys():
            raise ValueError(
                f"The voice {voice!r} is not one of {PACKAGE}: expected an accent such as {ACCENTS[0]!r}, a plus and a "
                f"file of {data}voices/!v, as in {VOICES['training'][0]!r}."
            )
        needed |= parts
    for name in sorted(needed):
        file = files[name].locate()
        if not Path(file).exists():
            raise RuntimeError(f"The voices of this example need {file}, which is missing. {INSTALL}")
        known = files[name].hash
        found = base64.urlsafe_b64encode(hashlib.new(known.mode, Path(file).read_bytes()).digest()).decode().rstrip("=")
        if found != known.value:
            raise RuntimeError(
                f"The voices of this example need {file}, which is damaged: its {known.mode} is {found}, and that of "
                f"the package is {known.value}. {INSTALL}"
            )
