"""Recordings of one's own: finds audio and transcripts in a folder, and makes of them what a recognizer trains on.

What cannot be used is left out and counted by its reason, or, if asked to be strict, is an error with its path.
"""

import collections
import csv
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import tokenizers

from examples.speech import features
from examples.speech.features import Speech
from examples.speech.replicates import of_power_one
from examples.speech.voices import SAMPLES_PER_SECOND, resampled

AUDIO = (".flac", ".wav", ".mp3", ".ogg", ".opus")
SPLITS = ("train", "dev", "test")
LETTERS = " 'abcdefghijklmnopqrstuvwxyz"
PATHS = ("path", "file_name", "audio_filepath", "audio")
TEXTS = ("sentence", "text", "transcription")
SPEAKERS = ("client_id", "speaker", "speaker_id")
LAYOUTS = (
    "LibriSpeech's *.trans.txt; a .tsv, metadata.csv or .jsonl with a column of paths and one of texts; or a .txt "
    "beside each file of audio"
)


class DataError(ValueError):
    """What is wrong with a folder or one of its files."""


class Recording(NamedTuple):
    """A file of audio, what is said in it, by whom, and the part of the data that it belongs to, if known."""

    path: Path
    text: str
    speaker: str
    split: str


class Part(NamedTuple):
    """One split: its utterances, the text of each, and the place of the speaker of each."""

    speech: Speech
    texts: list[str]
    speakers: np.ndarray


class Targets(NamedTuple):
    """From a text to labels, from one on, and back; and how many labels there are."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    size: int


def listed(root: Path, manifest: Path | None = None) -> list[Recording]:
    """What the transcripts of a folder name, in one of the ``LAYOUTS``."""
    if not root.is_dir():
        raise DataError(f"--data {root}: there is no such folder.")
    if manifest:
        rows = of_table(manifest, root)  # of one split, if its name is one
        return with_splits([each._replace(split=split_of(each.path.parent, root)) for each in rows])
    found = dict[str, Callable[[], list[Recording]]]()
    if transcripts := sorted(root.rglob("*.trans.txt")):
        found["*.trans.txt"] = lambda: [each for path in transcripts for each in of_librispeech(path, root)]
    tables = sorted([*root.rglob("*.tsv"), *root.rglob("metadata.csv"), *root.rglob("*.jsonl")])
    if parts := [path for path in tables if split_of(path, root)]:
        found[", ".join(path.name for path in parts)] = lambda: [
            each for path in parts for each in of_table(path, root)
        ]
    else:
        found |= {path.name: lambda path=path: of_table(path, root) for path in tables}
    beside = [
        path for path in sorted(root.rglob("*")) if path.suffix.lower() in AUDIO and path.with_suffix(".txt").exists()
    ]
    if not found and beside:
        found[".txt"] = lambda: [
            Recording(path, text_of(path.with_suffix(".txt")), path.parent.name, split_of(path.parent, root))
            for path in beside
        ]
    if not found:
        raise DataError(f"--data {root} has no transcripts. Expected {LAYOUTS}.")
    if len(found) > 1:
        kinds = ", ".join(found)
        raise DataError(f"--data {root} has transcripts of {len(found)} kinds: {kinds}. Choose a table by --manifest.")
    return with_splits(next(iter(found.values()))())


def split_of(path: Path, root: Path) -> str:
    """The split that a folder or a table is named after, such as ``train-clean-100`` or ``dev.tsv``."""
    parts = path.relative_to(root).parts if path.is_relative_to(root) else ()
    return next((split for part in parts for split in SPLITS if part.startswith(split)), "")


def text_of(path: Path) -> str:
    """What a file of transcripts says."""
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text in UTF-8: {error}.") from error


def of_librispeech(transcripts: Path, root: Path) -> list[Recording]:
    """Lines of a name, which begins with the speaker, and a text; the audio is in the same folder."""
    made = list[Recording]()
    for line in text_of(transcripts).splitlines():
        name, _, text = line.partition(" ")
        files = [transcripts.parent / (name + ending) for ending in AUDIO]
        path = next((file for file in files if file.exists()), files[0])
        made.append(Recording(path, text, name.partition("-")[0], split_of(transcripts, root)))
    return made


def of_table(table: Path, root: Path) -> list[Recording]:
    """Rows with a path, a text and perhaps a speaker. In a .tsv, as Common Voice writes it, quotes are letters."""
    lines = io.StringIO(text_of(table))
    try:
        if table.suffix == ".jsonl":
            rows = [dict(json.loads(line)) for line in lines if line.strip()]
        elif table.suffix == ".tsv":
            rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
        else:
            rows = list(csv.DictReader(lines))
    except (TypeError, ValueError, csv.Error) as error:
        raise DataError(f"{table} cannot be read as {table.suffix}: {error}.") from error
    columns = list(rows[0]) if rows else []
    path, text, speaker = (next((name for name in names if name in columns), "") for names in (PATHS, TEXTS, SPEAKERS))
    if not path or not text:
        raise DataError(
            f"{table}: expected a column of paths ({', '.join(PATHS)}) and one of texts ({', '.join(TEXTS)}), got "
            f"{', '.join(columns) or 'no rows'}."
        )
    made = list[Recording]()
    for row in rows:
        given = (row.get(column) for column in (path, text, speaker))
        name, told, who = ("" if each is None else str(each) for each in given)
        places = [folder / name for folder in (table.parent, table.parent / "clips", root, root / "clips")]
        file = next((place for place in places if place.exists()), places[0])
        split = split_of(table, root) or split_of(file.parent, root)
        made.append(Recording(file, told, who or file.parent.name, split))
    return made


def with_splits(recordings: list[Recording]) -> list[Recording]:
    """As they are named, or a tenth of the speakers for each of dev and test; of utterances, if speakers are few."""
    named = {each.split for each in recordings}
    if {*SPLITS} <= named:
        return [each for each in recordings if each.split]
    if named - {""}:
        raise DataError(
            f"There are splits called {', '.join(sorted(named - {''}))}. Expected {', '.join(SPLITS)}, or none: then a "
            "tenth of the speakers is dev, and a tenth test."
        )
    speakers = {each.speaker for each in recordings}
    unit = (lambda each: each.speaker) if len(speakers) >= 3 else (lambda each: each.path.as_posix())
    units = sorted({unit(each) for each in recordings}, key=shuffled)
    tenth = max(1, len(units) // 10)
    splits = dict.fromkeys(units, "train") | dict.fromkeys(units[:tenth], "dev")
    splits |= dict.fromkeys(units[tenth : 2 * tenth], "test")
    return [each._replace(split=splits[unit(each)]) for each in recordings]


def shuffled(name: str) -> int:
    """A key to sort by that has nothing to do with the name, and is always the same."""
    return zlib.crc32(name.encode())


def plain_text(text: str) -> str:
    """In small letters, without marks; a dash is a space."""
    text = text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    text = re.sub(r"[-\N{EN DASH}\N{EM DASH}]", " ", text)
    return " ".join("".join(letter for letter in text if letter.isalnum() or letter in " '").split())


def targets(asked: str, texts: Iterable[str]) -> Targets:
    """``letters``, or ``bpe:500``: so many pieces of words, which are learned from the texts of training."""
    kind, _, size = asked.partition(":")
    if asked == "letters":
        return Targets(
            lambda text: [1 + LETTERS.index(letter) for letter in text],
            lambda labels: "".join(LETTERS[label - 1] for label in labels),
            len(LETTERS),
        )
    if kind != "bpe" or not size.isdigit() or int(size) < 1:
        raise DataError(f"--targets {asked}: expected letters or bpe:SIZE, such as bpe:500.")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=int(size), show_progress=False))
    return Targets(
        lambda text: [1 + each for each in tokenizer.encode(text).ids],
        lambda labels: tokenizer.decode([label - 1 for label in labels]),
        tokenizer.get_vocab_size(),
    )


def samples_of(path: Path) -> np.ndarray:
    """One channel at ``SAMPLES_PER_SECOND``."""
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    return resampled(samples.mean(1), rate) if len(samples) else samples[:, 0]


def fault_of_text(recording: Recording, text: str, *, letters: bool) -> str:
    """Why a recording cannot be used, as far as is known before its audio is read; or nothing."""
    if not recording.path.exists():
        return "there is no such file"
    if not text:
        return "its transcript is empty"
    foreign = {letter for letter in text if letter not in LETTERS}
    return f"its transcript has unknown letters: {' '.join(sorted(foreign))}" if foreign and letters else ""


def fault_of_audio(samples: np.ndarray, labels: list[int], longest: float) -> str:
    """Why what was read cannot be used; or nothing."""
    if len(samples) < features.WINDOW or not samples.any():
        return "it has no sound"
    if len(samples) > longest * SAMPLES_PER_SECOND:
        return f"it is longer than {longest:g} s"
    needed = len(labels) + sum(one == other for one, other in itertools.pairwise(labels))
    return "it is too short for its transcript" if features.frames_of(len(samples)) // 4 < needed else ""


def load(
    recordings: list[Recording],
    asked: str,
    *,
    longest: float,
    hours: float,
    strict: bool,
    track: Callable[[list], Iterable] = iter,
) -> tuple[dict[str, Part], Targets, dict[str, list[Path]]]:
    """The splits, their targets, and what was left out, by reason.

    Args:
      recordings: What transcripts name.
      asked: ``letters`` or ``bpe:SIZE``.
      longest: Seconds; what is longer is left out.
      hours: How much of each split is read at most.
      strict: Whether the first file that cannot be used is an error.
      track: Shows progress.
    """
    faults = collections.defaultdict[str, list[Path]](list)

    def leave(path: Path, fault: str, cause: Exception | None = None) -> None:
        if strict:
            raise DataError(f"{path}: {fault}. Without --strict it is left out and counted.") from cause
        faults[re.sub(": .*", "", fault)].append(path)

    usable = list[Recording]()
    for each in recordings:
        text = plain_text(each.text)
        if fault := fault_of_text(each, text, letters=asked == "letters"):
            leave(each.path, fault)
        else:
            usable.append(each._replace(text=text))
    made = targets(asked, (each.text for each in usable if each.split == "train"))
    read = {split: list[tuple[np.ndarray, list[int], Recording]]() for split in SPLITS}
    seconds = dict.fromkeys(SPLITS, 0.0)
    for each in track(sorted(usable, key=lambda each: shuffled(each.path.name))):  # hours of all speakers
        if seconds[each.split] >= 3600 * hours:
            continue
        try:
            samples = samples_of(each.path)
        except (soundfile.SoundFileError, OSError) as error:
            told = str(error).rstrip(".") or type(error).__name__  # of a broken FLAC there may be no text
            leave(each.path, f"it cannot be read as audio: {told}", error)
            continue
        labels = made.encode(each.text)
        if fault := fault_of_audio(samples, labels, longest):
            leave(each.path, fault)
            continue
        seconds[each.split] += len(samples) / SAMPLES_PER_SECOND
        read[each.split].append((samples, labels, each))
    if empty := [split for split in SPLITS if not read[split]]:
        told = "; ".join(f"{len(paths)}: {fault}, such as {paths[0]}" for fault, paths in faults.items())
        raise DataError(f"Nothing is left of {', '.join(empty)}. Left out: {told or 'nothing'}.")
    parts = {split: part_of(sorted(kept, key=lambda each: each[2].path)) for split, kept in read.items()}
    return parts, made, dict(faults)


def part_of(kept: list[tuple[np.ndarray, list[int], Recording]]) -> Part:
    """One split of what was read."""
    speech = features.speech(
        [of_power_one(samples) for samples, _, _ in kept], [np.array(labels) for _, labels, _ in kept]
    )
    names = np.array([recording.speaker for _, _, recording in kept])
    return Part(speech, [recording.text for _, _, recording in kept], np.unique(names, return_inverse=True)[1])


def buckets(lengths: np.ndarray) -> tuple[float, ...]:
    """Four lengths in seconds, in halves, that hold about as many utterances each."""
    quarters = np.quantile(lengths / SAMPLES_PER_SECOND, (0.25, 0.5, 0.75, 1.0))
    return tuple(sorted({float(np.ceil(2 * each) / 2) for each in quarters}))
