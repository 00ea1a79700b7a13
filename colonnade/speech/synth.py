"""Synthesises sentences with espeak-ng, with phoneme times: training data with known alignment.

Sentences have GRID's form (command, colour, preposition, letter, digit, adverb; Cooke et al., 2006): 51 words. Voices
are accents × variants of espeak-ng, which is called through ctypes. The library has one global state per loaded file,
so this module loads a private copy of it and runs one call at a time: other users of espeakng-loader in the process
can neither terminate nor change it.
"""

import ctypes
import functools
import shutil
import tempfile
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from colonnade.errors import ColonnadeError, DataError
from colonnade.speech.pcm import require, resample

GRAMMAR = (
    ("bin", "lay", "place", "set"),
    ("blue", "green", "red", "white"),
    ("at", "by", "in", "with"),
    tuple("abcdefghijklmnopqrstuvxyz"),
    ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    ("again", "now", "please", "soon"),
)
ACCENTS = ("en-us", "gmw/en", "en-gb-scotland", "en-gb-x-rp", "en-029")
VARIANTS = ("m1", "m2", "m3", "m4", "m5", "m7", "f1", "f2", "f3", "f4", "f5", "croak")
VOICES = tuple(f"{accent}+{variant}" for accent in ACCENTS for variant in VARIANTS)
END, WORD, PHONEME = 0, 1, 7


class Phoneme(NamedTuple):
    """A phoneme and where it begins."""

    start_s: float
    name: str


class SynthesisedSpeech(NamedTuple):
    """16 kHz samples, phonemes, and where each word begins and ends; phonemes that begin with _ are silence."""

    samples: np.ndarray
    phonemes: Sequence[Phoneme]
    words: Sequence[tuple[float, float]]


class _Id(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8))


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("identifier", ctypes.c_uint), ("text_position", ctypes.c_int),
        ("length", ctypes.c_int), ("audio_position", ctypes.c_int), ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p), ("id", _Id),
    )  # fmt: skip


_lock = threading.Lock()
"""Held during a call: the library's voice, parameters and callback are global."""
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))


@functools.cache
def _library() -> tuple[ctypes.CDLL, int]:
    """A private copy of espeak-ng, initialised, and its rate [Hz].

    Loading the same file twice gives one library with one state: if other code calls espeak_Terminate, every later
    espeak_Synth fails. A copy is a separate library; its file is needed only while it is loaded.
    """
    loader = require("espeakng_loader", "speech-data")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        library = ctypes.CDLL(shutil.copy(loader.get_library_path(), folder))
    synchronous, phoneme_events, no_exit = 2, 1, 0x8000
    rate = library["espeak_Initialize"](synchronous, 0, str(loader.get_data_path()).encode(), phoneme_events | no_exit)
    if rate <= 0:
        raise ColonnadeError("espeak-ng does not start; reinstall espeakng-loader")
    return library, rate


def speak(text: str, voice: str = "en-us", speed: int = 170, pitch: int = 50) -> SynthesisedSpeech:
    """``text`` in a voice of :data:`VOICES`; ``speed`` in words per minute, ``pitch`` 0 to 99."""
    if "\0" in text:
        raise DataError("text contains a null character; remove it")
    parts: list[np.ndarray] = []
    phonemes: list[Phoneme] = []
    starts: list[float] = []

    def receive(samples, count: int, events) -> int:
        if samples and count > 0:
            parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        i = 0
        while events[i].type != END:
            if events[i].type == PHONEME:
                name = bytes(events[i].id.string).split(b"\0")[0].decode("utf-8", "replace")
                phonemes.append(Phoneme(events[i].audio_position / 1000, name))
            elif events[i].type == WORD:
                starts.append(events[i].audio_position / 1000)
            i += 1
        return 0

    callback = _Callback(receive)
    with _lock:
        library, rate = _library()
        library["espeak_SetSynthCallback"](callback)
        if library["espeak_SetVoiceByName"](voice.encode()):
            raise DataError(f"espeak-ng has no voice {voice!r}; use one of {', '.join(VOICES[:3])} …")
        library["espeak_SetParameter"](1, speed, 0)
        library["espeak_SetParameter"](3, pitch, 0)
        data, utf8 = text.encode(), 1
        status = library["espeak_Synth"](data, ctypes.c_size_t(len(data) + 1), 0, 1, 0, utf8, None, None)
        if status:
            raise ColonnadeError(
                f"espeak-ng cannot speak {text[:40]!r} (status {status}, {len(data)} bytes); restart the process"
            )
        library["espeak_Synchronize"]()
    samples = np.concatenate(parts).astype(np.float32) / 32768 if parts else np.zeros(0, np.float32)
    # A word lasts until the next one begins, or a silence before that.
    ends = [*starts[1:], len(samples) / rate]
    silences = [p.start_s for p in phonemes if p.name.startswith("_")]
    words = (
        [
            (start, min((x for x in silences if start < x < end), default=end))
            for start, end in zip(starts, ends, strict=True)
        ]
        if starts
        else []
    )
    return SynthesisedSpeech(resample(samples, rate), phonemes, words)


def sentence(random: np.random.Generator) -> str:
    """A sentence of the grammar."""
    return " ".join(words[random.integers(len(words))] for words in GRAMMAR)


def voice_split(test: bool) -> list[str]:
    """The voices of the training or the test set: no voice is in both."""
    return [voice for i, voice in enumerate(VOICES) if (i % 6 == 5) == test]
