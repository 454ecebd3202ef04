"""Speaks with espeak-ng, as a program of its own: ``voices.py`` runs it, and sends and reads what is said.

What the library says depends on all that it said before, and a damaged file of voices can end the process: so each list
of sentences has a process of its own. The library is that of the package espeakng-loader; its license is the GPL.
"""

import ctypes
import json
import sys

import espeakng_loader
import numpy as np

SAMPLES_PER_SECOND = 22050
RETRIEVAL, DO_NOT_EXIT, UTF8, RATE, PITCH = 2, 0x8000, 1, 1, 3
"""Numbers of espeak-ng's speak_lib.h."""
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


def main() -> None:
    """Reads sentences as ``[text, voice, rate, pitch]``; writes the lengths of all, and their samples as int16."""
    library, parts = ctypes.CDLL(espeakng_loader.get_library_path()), list[np.ndarray]()

    @CALLBACK
    def receive(samples, count, _):
        if samples and count > 0:
            parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    found = library.espeak_Initialize(RETRIEVAL, 0, espeakng_loader.get_data_path().encode(), DO_NOT_EXIT)
    if found != SAMPLES_PER_SECOND:
        sys.exit(f"espeak_Initialize gave {found} instead of {SAMPLES_PER_SECOND} samples a second.")
    library.espeak_SetSynthCallback(receive)
    sentences = list[np.ndarray]()
    for text, voice, rate, pitch in json.load(sys.stdin):
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
    main()
