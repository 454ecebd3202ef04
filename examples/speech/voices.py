"""What is said, by whom, and in how much noise: strings of digits, drawn with a seed and spoken where this runs."""

import base64
import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import signal

PACKAGE, SPEAKER = "espeakng-loader", Path(__file__).with_name("speaker.py")
SAMPLES_PER_SECOND, SECONDS = 16000, 3.0
"""Longer utterances are left out, so that all fit into arrays of one length."""
SPOKEN = 22050
"""Samples a second of espeak-ng."""
INSTALL = f"Install it again with: pip install --force-reinstall {PACKAGE}"
DATA = "espeakng_loader/espeak-ng-data/"

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("en-US", "en", "en-029", "en-GB-scotland", "en-GB-x-rp", "en-GB-x-gbclan", "en-GB-x-gbcwmd", "en-US-nyc")


class Utterance(NamedTuple):
    """Samples between -1 and 1, the words by their places in the list of words, and the place of the voice."""

    samples: np.ndarray
    words: np.ndarray
    voice: int


def drawn_voices(count: int, drawn: np.random.Generator) -> dict[str, str]:
    """Names of voices, each an accent and a variant, and the file of each variant for espeak-ng.

    A size of the vocal tract scales all formants: to 1.05 these are men, to 1.2 women, above that children. The pitch
    goes with it, and each formant, the voicing and the breath have a deviation of their own.
    """
    voices = dict[str, str]()
    for i in range(count):
        size = drawn.uniform(0.88, 1.28)
        pitch = 105 * 2 ** ((size - 0.97) / 0.21 + drawn.normal(0, 0.18))
        lines = ["language variant", f"name drawn{i}", f"pitch {pitch:.0f} {pitch * drawn.uniform(1.2, 1.7):.0f}"]
        for formant in range(9):
            place = size * (1 + drawn.normal(0, 0.035 if formant < 4 else 0.05)) if formant else 1
            height, width = drawn.uniform(70, 120), drawn.uniform(75, 145)
            lines.append(f"formant {formant} {100 * place:.0f} {height:.0f} {width:.0f}")
        lines.append(f"voicing {drawn.uniform(70, 140):.0f}")
        lines.append(f"consonants {drawn.uniform(70, 120):.0f} {drawn.uniform(70, 120):.0f}")
        lines.append(f"flutter {drawn.integers(9)}")
        lines.append(f"roughness {drawn.integers(5)}")
        if drawn.random() < 0.3:
            lines.append("breath " + " ".join(str(each) for each in drawn.integers(5, size=8)))
        if drawn.random() < 0.4:
            heights = drawn.integers(140, 200), drawn.integers(80, 150), drawn.integers(50, 120)
            lines.append("tone 600 {} 1200 {} 2000 {}".format(*heights))
        voices[f"{ACCENTS[drawn.integers(len(ACCENTS))]}+drawn{i}"] = "\n".join(lines) + "\n"
    return voices


def named_voices() -> list[str]:
    """Every variant that espeak-ng ships and finds by its name, each with one of the accents in turn."""
    prefix = f"{DATA}voices/!v/"
    variants = sorted(name.removeprefix(prefix) for name in packaged() if name.startswith(prefix))
    speakable = [name for name in variants if " " not in name]  # a name ends at a space
    return [f"{accent}+{name}" for name, accent in zip(speakable, itertools.cycle(ACCENTS), strict=False)]


def utterances(
    voices: Iterable[str], each: int, drawn: np.random.Generator, files: Mapping[str, str] | None = None
) -> list[Utterance]:
    """From every voice this many strings of three to seven digits, at a rate and a pitch of their own.

    ``files`` are those of voices that are drawn.
    """
    voices, strings, sentences = list(voices), list[tuple[np.ndarray, int]](), list[tuple[str, str, int, int]]()
    for place, voice in enumerate(voices):
        for _ in range(each + each // 3 + 2):
            words = drawn.integers(len(WORDS), size=drawn.integers(3, 8))
            rate, pitch = drawn.integers(130, 221), drawn.integers(30, 71)
            strings.append((words, place))
            sentences.append((" ".join(WORDS[i] for i in words), voice, int(rate), int(pitch)))
    kept = [list[Utterance]() for _ in voices]
    for samples, (words, place) in zip(speak(sentences, files or {}), strings, strict=True):
        if len(samples) <= SECONDS * SAMPLES_PER_SECOND and len(kept[place]) < each:
            kept[place].append(Utterance(samples, words, place))
    for voice, said in zip(voices, kept, strict=True):
        if len(said) < each:
            raise ValueError(
                f"{voice} was asked for {each} strings, and only {len(said)} of them last up to {SECONDS} s."
            )
    return list(itertools.chain(*kept))


def speak(sentences: list[tuple[str, str, int, int]], files: Mapping[str, str] | None = None) -> list[np.ndarray]:
    """The samples of each ``(text, voice, rate, pitch)``: the same list gives the same samples.

    ``files`` are those of voices that are drawn: they are beside those of the package while it speaks.
    """
    files = files or {}
    check({voice for _, voice, _, _ in sentences} - files.keys())
    drawn = {name.partition("+")[2]: text for name, text in files.items()}
    asked = json.dumps({"voices": drawn, "sentences": sentences}).encode()
    done = subprocess.run([sys.executable, str(SPEAKER)], input=asked, capture_output=True, check=False)
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip()[-500:] or f"the process ended with {done.returncode}"
        raise RuntimeError(f"espeak-ng failed to speak {len(sentences)} sentences: {told} {INSTALL}")
    head, samples = done.stdout.split(b"\n", 1)
    ends = np.cumsum(json.loads(head))[:-1]
    spoken = np.split(np.frombuffer(samples, np.int16), ends)
    return [resampled(each.astype(np.float32) / 2**15, SPOKEN) for each in spoken]


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """From this many samples a second to ``SAMPLES_PER_SECOND``."""
    common = np.gcd(SAMPLES_PER_SECOND, rate)
    return signal.resample_poly(samples, SAMPLES_PER_SECOND // common, rate // common).astype(np.float32)


def packaged() -> dict[str, object]:
    """The files of the package by their names, with checksums."""
    try:
        return {file.as_posix(): file for file in distribution(PACKAGE).files or ()}
    except PackageNotFoundError:
        raise RuntimeError(
            f"The speech of this example is made by the package {PACKAGE}, which is not installed. "
            f"Install it with: pip install {PACKAGE}"
        ) from None


def check(voices: Iterable[str]) -> None:
    """Compares the files that these voices need with the checksums of the package.

    espeak-ng itself speaks on without a word: with the voice before, or with none.
    """
    files = packaged()
    needed = {DATA + name for name in ("phondata", "phonindex", "phontab", "intonations", "en_dict")}
    needed |= {name for name in files if name.endswith((".so", ".dylib", ".dll"))}
    for voice in sorted(voices):
        accent, _, variant = voice.partition("+")
        parts = {f"{DATA}lang/gmw/{accent}", f"{DATA}voices/!v/{variant}"}
        if not parts <= files.keys():
            raise ValueError(
                f"The voice {voice!r} is not one of {PACKAGE}: expected an accent such as {ACCENTS[0]!r}, a plus and a "
                f"file of {DATA}voices/!v, as in 'en-US+m1'."
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
