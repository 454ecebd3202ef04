"""Speaks with espeak-ng, as a program of its own: ``voices.py`` runs it, and sends and reads what is said.

What the library says depends on all that it said before, and a damaged file of voices can end the process: so each list
of sentences has a process of its own. The library is that of the package espeakng-loader; its license is the GPL.
"""

import ctypes
import json
import sys
import tempfile
from pathlib import Path

import espeakng_loader
import numpy as np

SAMPLES_PER_SECOND = 22050
RETRIEVAL, DO_NOT_EXIT, UTF8, RATE, PITCH = 2, 0x8000, 1, 1, 3
"""Numbers of espeak-ng's speak_lib.h."""
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


def with_voices(voices: dict[str, str], folder: Path) -> None:
    """Makes a data folder that has these files of variants, and links to what the package has."""
    package = Path(espeakng_loader.get_data_path())
    variants = folder / "voices" / "!v"
    variants.mkdir(parents=True)
    for there, here in ((package, folder), (package / "voices", folder / "voices"), (package / "voices/!v", variants)):
        for path in there.iterdir():
            if not (here / path.name).exists():
                (here / path.name).symlink_to(path)
    for name, text in voices.items():
        (variants / name).write_text(text)


def main(asked: dict, folder: Path) -> None:
    """Says sentences, each ``[text, voice, rate, pitch]``; writes the lengths of all, and their samples as int16."""
    with_voices(asked["voices"], folder)
    library, parts = ctypes.CDLL(espeakng_loader.get_library_path()), list[np.ndarray]()

    @CALLBACK
    def receive(samples, count, _):
        if samples and count > 0:
            parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    found = library.espeak_Initialize(RETRIEVAL, 0, str(folder).encode(), DO_NOT_EXIT)
    if found != SAMPLES_PER_SECOND:
        sys.exit(f"espeak_Initialize gave {found} instead of {SAMPLES_PER_SECOND} samples a second.")
    library.espeak_ng_SetRandSeed(ctypes.c_long(0))  # of breath and roughness, else from the clock
    library.espeak_SetSynthCallback(receive)
    sentences = list[np.ndarray]()
    for text, voice, rate, pitch in asked["sentences"]:
        parts.clear()
        said = text.encode()
        status = [
            library.espeak_SetVoiceByName(voice.encode()),
            library.espeak_SetParameter(RATE, rate, 0),
            library.espeak_SetParameter(PITCH, pitch, 0),
            library.espeak_Synth(said, len(said) + 1, 0, 0, 0, UTF8, None, None),
            library.espeak_Synchronize(),
        ]
        if any(status):
            sys.exit(f"{voice!r} could not say {text!r}: voice, rate, pitch, speech and end gave {status}, not zeros.")
        sentences.append(np.concatenate(parts, dtype=np.int16))
    sys.stdout.write(json.dumps([len(each) for each in sentences]) + "\n")
    sys.stdout.flush()
    sys.stdout.buffer.write(np.concatenate(sentences).tobytes())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(json.load(sys.stdin), Path(made))
