"""Speech for tests, made by espeak-ng (the package espeakng-loader: its library and voices)."""

import ctypes
from pathlib import Path

import espeakng_loader
import numpy as np
import soundfile

_SYNCHRONOUS, _UTF8 = 2, 1
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


def say(text: str, words_per_minute: int = 140) -> tuple[np.ndarray, int]:
    """(int16 samples, rate) of ``text``, spoken in English."""
    library = ctypes.CDLL(espeakng_loader.get_library_path())
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), 0)
    assert rate > 0, "espeak-ng cannot start"
    parts: list[np.ndarray] = []

    def collect(samples, count, events) -> int:
        if samples and count > 0:
            parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    kept = _CALLBACK(collect)
    library.espeak_SetSynthCallback(kept)
    library.espeak_SetVoiceByName(b"en-us")
    library.espeak_SetParameter(1, words_per_minute, 0)
    data = text.encode() + b"\0"
    library.espeak_Synth(data, ctypes.c_size_t(len(data)), 0, 0, 0, _UTF8, None, None)
    library.espeak_Synchronize()
    library.espeak_Terminate()
    return np.concatenate(parts), rate


def save(text: str, path: Path) -> Path:
    """Write spoken ``text`` as a sound file."""
    samples, rate = say(text)
    soundfile.write(path, samples, rate)
    return path
