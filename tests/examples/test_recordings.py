"""Recordings of one's own: transcripts are found, audio is read, and what cannot be used is said with its path."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import soundfile
from errors import table

from examples.speech import __main__ as demo
from examples.speech import recordings
from examples.speech.recordings import Recording, listed, targets
from examples.speech.voices import SAMPLES_PER_SECOND

LIBRIVOX = Path("/usr/share/pocketsphinx/test/data/librivox")
"""Of Debian's package pocketsphinx-testdata: recordings of LibriVox, with transcripts."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where paths are relative to; the networks are those of flax."""
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield tmp_path


def tone(path, hertz=440.0, seconds=1.0, rate=SAMPLES_PER_SECOND, channels=1):
    """Writes a file in the format of its ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = 0.3 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)
    soundfile.write(path, np.tile(samples[:, None], (1, channels)), rate)
    return path


def librispeech(root, ending="flac"):
    """Three splits of two utterances by two speakers each, as LibriSpeech has them."""
    for at, split in enumerate(("train-clean-100", "dev-clean", "test-other")):
        for speaker in (2 * at, 2 * at + 1):
            place = root / split / str(speaker) / "7"
            for i in range(2):
                tone(place / f"{speaker}-7-{i:04}.{ending}", 300 + 20 * speaker + 100 * i)
            lines = [f"{speaker}-7-{i:04} {'AB IT' if i else 'BAD CAB'}" for i in range(2)]
            (place / f"{speaker}-7.trans.txt").write_text("\n".join(lines) + "\n")
    return root


def loaded(found, asked="letters", *, strict=False, longest=5.0, hours=1.0):
    return recordings.load(found, asked, longest=longest, hours=hours, strict=strict)


def test_librispeech_is_found_with_its_splits_and_speakers(folder):
    found = listed(librispeech(folder / "data"))
    assert len(found) == 12
    assert found[0] == Recording(folder / "data/dev-clean/2/7/2-7-0000.flac", "BAD CAB", "2", "dev")
    parts, made, left_out = loaded(found)
    assert left_out == {}
    assert {split: part.speech.lengths.tolist() for split, part in parts.items()} == dict.fromkeys(
        ("train", "dev", "test"), [16000] * 4
    )
    assert parts["dev"].speakers.tolist() == [0, 0, 1, 1]
    assert parts["train"].texts == ["bad cab", "ab it"] * 2
    labels = [each for each in parts["train"].speech.labels[0].tolist() if each]
    assert labels == [1 + " 'abcdefghijklmnopqrstuvwxyz".index(letter) for letter in "bad cab"]
    assert made.decode(labels) == "bad cab"
    np.testing.assert_allclose(np.mean(np.float32(parts["train"].speech.samples[0]) ** 2), 1, rtol=1e-2)


@pytest.mark.parametrize(("ending", "rate", "channels"), [("flac", 8000, 2), ("wav", 22050, 1), ("mp3", 44100, 2)])
def test_a_tone_is_itself_whatever_its_format_its_rate_and_its_channels(folder, ending, rate, channels):
    samples = recordings.samples_of(tone(folder / f"a.{ending}", 440.0, 1.0, rate, channels))
    assert abs(len(samples) - SAMPLES_PER_SECOND) < 0.1 * SAMPLES_PER_SECOND  # mp3 has whole blocks
    middle = samples[4000:12000]
    assert np.abs(np.fft.rfft(middle)).argmax() * 2 == 440
    np.testing.assert_allclose(middle.std(), 0.3 / 2**0.5, rtol=0.05)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_tables_of_common_voice_have_quotes_as_letters_and_clips_in_their_folder(folder):
    tone(folder / "cv/clips/a.mp3")
    for split in ("train", "dev", "test", "validated"):
        write(folder / f"cv/{split}.tsv", f'client_id\tpath\tsentence\n{split}1\ta.mp3\t"He said\n')
    found = listed(folder / "cv")
    assert [(each.split, each.speaker, each.text) for each in found] == [
        (split, f"{split}1", '"He said') for split in ("dev", "test", "train")
    ]
    assert {each.path for each in found} == {folder / "cv/clips/a.mp3"}


def test_a_manifest_is_split_by_its_speakers_whatever_its_name_and_that_of_its_files(folder):
    rows = "".join(f"testimony{i}.mp3\tb\t{i}\n" for i in range(4))
    write(folder / "train.tsv", f"path\ttext\tspeaker\n{rows}")
    assert sorted(each.split for each in listed(folder, folder / "train.tsv")) == ["dev", "test", "train", "train"]


def test_other_tables_and_texts_beside_the_audio_are_found_and_speakers_are_split(folder):
    names = [f"{i:02}.wav" for i in range(20)]
    write(folder / "hf/metadata.csv", "file_name,text,speaker\n" + "".join(f'{n},"a, b",{n[0]}{n[1]}\n' for n in names))
    found = listed(folder / "hf")
    assert {each.text for each in found} == {"a, b"}
    assert sorted(each.split for each in found) == ["dev"] * 2 + ["test"] * 2 + ["train"] * 16
    assert listed(folder / "hf") == found
    write(
        folder / "short/metadata.csv", "\ufefffile_name,text,speaker\n0.wav\n1.wav,a,\n2.wav,b,0\n"
    )  # as Excel writes it
    assert [(each.text, each.speaker) for each in sorted(listed(folder / "short"))] == [
        ("", "short"),
        ("a", "short"),
        ("b", "0"),
    ]
    lines = [json.dumps({"audio_filepath": name, "text": "b", "speaker": int(name[1]) % 3}) for name in names]
    write(folder / "nemo/all.jsonl", "\n".join(lines) + "\n")
    by_split = {split: {e.speaker for e in listed(folder / "nemo") if e.split == split} for split in recordings.SPLITS}
    assert sorted(map(len, by_split.values())) == [1, 1, 1]
    assert len(set().union(*by_split.values())) == 3
    for name in names:
        tone(folder / "beside" / "one" / name)
        write(folder / "beside" / "one" / name.replace("wav", "txt"), "c\n")
    found = listed(folder / "beside")
    assert sorted(each.split for each in found) == ["dev"] * 2 + ["test"] * 2 + ["train"] * 16  # of one speaker
    assert found[0].speaker == "one"


def broken(root):
    """Every fault once, in the training split."""
    librispeech(root)
    place = root / "train-clean-100" / "0" / "7"
    faults = {
        "0-7-0002": ("there", "missing"),
        "0-7-0003": ("", tone),
        "0-7-0004": ("NAIVE CAFÉ 9", tone),
        "0-7-0005": ("BROKEN", lambda path: path.write_bytes(b"fLaC" + bytes(50))),
        "0-7-0006": ("LONG", lambda path: tone(path, seconds=6)),
        "0-7-0007": ("TOO SHORT FOR ALL OF THIS", lambda path: tone(path, seconds=0.2)),
        "0-7-0008": ("SILENT", lambda path: tone(path, hertz=0)),
    }
    with (place / "0-7.trans.txt").open("a") as lines:
        for name, (text, make) in faults.items():
            lines.write(f"{name} {text}\n")
            if callable(make):
                make(place / f"{name}.flac")
    return root


def test_what_cannot_be_used_is_left_out_and_counted_by_its_reason():
    parts, _, left_out = loaded(listed(broken(Path("data"))))
    assert len(parts["train"].texts) == 4
    assert {reason: [path.stem for path in paths] for reason, paths in left_out.items()} == {
        "there is no such file": ["0-7-0002"],
        "its transcript is empty": ["0-7-0003"],
        "its transcript has unknown letters": ["0-7-0004"],
        "it cannot be read as audio": ["0-7-0005"],
        "it is longer than 5 s": ["0-7-0006"],
        "it is too short for its transcript": ["0-7-0007"],
        "it has no sound": ["0-7-0008"],
    }


def strictly(number):
    """The error of one of the faults."""
    found = [each for each in listed(broken(Path("data"))) if each.path.stem == f"0-7-{number:04}"]
    return loaded(found, strict=True)


def only_broken():
    """Where nothing is left."""
    return loaded([each._replace(path=Path("nowhere")) for each in listed(librispeech(Path("data")))])


def table_of(text, ending="tsv"):
    """A folder whose table is this text."""
    write(Path(f"data/all.{ending}"), text)
    return listed(Path("data"))


def two_kinds():
    """A folder with a table beside LibriSpeech's transcripts."""
    librispeech(Path("data"))
    return table_of("path\ttext\na.wav\tb\n")


def two_splits():
    """A folder without a split for tests."""
    for split in ("train", "dev"):
        write(Path(f"data/{split}.tsv"), "path\ttext\na.wav\tb\n")
    return listed(Path("data"))


@table(__file__)
def test_errors(case):
    case.check(globals())


def test_pieces_of_words_are_learned_from_the_texts_of_training():
    made = targets("bpe:40", ["the cat sat", "the bat sat", "that cat"] * 5)
    labels = made.encode("the cat sat")
    assert made.decode(labels) == "the cat sat"
    assert 0 < min(labels) <= max(labels) <= made.size <= 40
    assert len(labels) < len("the cat sat")


def test_hours_bound_what_is_read_and_take_it_from_all_of_a_split():
    root = librispeech(Path("data"))
    place = root / "train-clean-100" / "0" / "7"
    with (place / "0-7.trans.txt").open("a") as lines:
        for i in range(2, 40):
            tone(place / f"0-7-{i:04}.flac")
            lines.write(f"0-7-{i:04} {'AB' if i < 20 else 'CAB'}\n")
    parts, _, _ = loaded(listed(root), hours=2 / 3600)
    assert {len(part.texts) for part in parts.values()} == {2}
    texts = loaded(listed(root), hours=20 / 3600)[0]["train"].texts
    assert min(texts.count("ab"), texts.count("cab")) >= 5  # not the first ones


def test_buckets_hold_quarters_and_the_longest():
    assert recordings.buckets(np.array([1, 2, 3, 4.1, 7]) * SAMPLES_PER_SECOND) == (2.0, 3.0, 4.5, 7.0)


@pytest.mark.skipif(not LIBRIVOX.exists(), reason="Debian's package pocketsphinx-testdata is not installed")
def test_recordings_of_debian_are_read():
    rows = [
        line.removesuffix(")").partition(" </s> (") for line in (LIBRIVOX / "transcription").read_text().splitlines()
    ]
    lines = [{"audio": f"{LIBRIVOX / name}.wav", "text": text.removeprefix("<s> ")} for text, _, name in rows]
    write(Path("data/all.jsonl"), "\n".join(json.dumps(line) for line in lines))
    parts, _, left_out = loaded(listed(Path("data")), longest=20.0, strict=True)
    assert left_out == {}
    assert sum(len(part.texts) for part in parts.values()) == len(rows) == 5
    letters = sum(map(len, parts["train"].texts))
    seconds = parts["train"].speech.lengths.sum() / SAMPLES_PER_SECOND
    assert 8 < letters / seconds < 20  # as people read


def test_the_program_trains_on_voices_that_are_drawn(monkeypatch, capsys):
    monkeypatch.setattr(demo, "BODIES", {"lstm": lambda words: small(words)})
    few = demo.dataclasses.replace(demo.SETTINGS, batch=2, each=1, voices=3, buckets=(3.0,))
    monkeypatch.setattr(demo, "SETTINGS", few)
    demo.main(["--steps", "2", "--utterances", "6", "--ways", "plain"])
    said = " ".join(capsys.readouterr().out.split())
    assert "6 utterances after" in said
    assert "plain: learning rate" in said
    assert "0 dB" in said
    assert (Path("build") / "speech" / "speech.png").exists()


def test_the_program_trains_on_a_folder_and_goes_on_where_it_stopped(monkeypatch, capsys):
    librispeech(Path("data"))
    (Path("data") / "train-clean-100/0/7/0-7-0001.flac").write_bytes(b"no audio")
    monkeypatch.setattr(demo, "BODIES", {"lstm": lambda words: small(words)})
    monkeypatch.setattr(demo, "SETTINGS", demo.dataclasses.replace(demo.SETTINGS, batch=2))
    asked = ["--data", "data", "--epochs", "2", "--ways", "plain", "weight noise"]
    demo.main(asked)
    said = " ".join(capsys.readouterr().out.split())
    assert "train: 3 utterances, 0.00 hours, 2 speakers" in said
    assert "left out: 1, as it cannot be read as audio, such as data/train-clean-100/0/7/0-7-0001.flac" in said
    assert "dev WER" in said
    assert "weight noise against plain:" in said
    assert (Path("build") / "speech" / "speech.png").exists()
    table = said[said.index("By speakers") : said.index("Curves")]
    demo.main([*asked, "--resume"])
    said = " ".join(capsys.readouterr().out.split())
    assert said[said.index("By speakers") : said.index("Curves")] == table
    assert "dev WER" not in said  # nothing was trained
    with pytest.raises(
        recordings.DataError, match=r"--resume: build/speech/plain\.npz is of another run\. Expected Run"
    ):
        demo.main(["--data", "data", "--epochs", "2", "--ways", "plain", "--resume", "--seed", "1"])
    with pytest.raises(SystemExit):
        demo.main(["--strict"])
    assert "--manifest and --strict are about the recordings of --data DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        demo.main(["--hours", "0"])
    assert "--hours 0.0: expected a number above 0" in capsys.readouterr().err


def small(words):
    from examples.speech.model import Recognizer

    return Recognizer(words, width=8, layers=1)
