"""Samples at 16 kHz: resampled by soxr, written by soundfile; optional packages."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from colonnade.errors import DataError, RequestError

RATE = 16000


def require(name: str, extra: str = "speech") -> Any:
    """Import an optional package; raises RequestError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise RequestError(f"{name} is not installed: pip install 'colonnade[{extra}]'") from None


class Resampler:
    """Resamples a stream from ``rate`` to 16 kHz in parts; the result does not depend on how it is cut."""

    def __init__(self, rate: int):
        if not 1000 <= rate <= 768_000:
            raise DataError(f"a rate of {rate} Hz; use 1,000 to 768,000")
        self._stream = None if rate == RATE else require("soxr").ResampleStream(rate, RATE, 1, dtype="float32")

    def push(self, samples: np.ndarray) -> np.ndarray:
        """The float32 samples at 16 kHz that become available with ``samples``."""
        samples = np.ascontiguousarray(samples, np.float32)
        return samples if self._stream is None else self._stream.resample_chunk(samples)

    def finish(self) -> np.ndarray:
        """The last samples."""
        nothing = np.zeros(0, np.float32)
        return nothing if self._stream is None else self._stream.resample_chunk(nothing, last=True)


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    """Samples at ``rate`` to 16 kHz."""
    resampler = Resampler(rate)
    return np.concatenate([resampler.push(samples), resampler.finish()])


def write_audio(path: Path, samples: np.ndarray) -> None:
    """Write 16-bit samples at 16 kHz; the suffix determines the format."""
    require("soundfile").write(str(path), np.clip(samples, -1, 1), RATE, subtype="PCM_16")
