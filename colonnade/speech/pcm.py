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


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    """Samples at ``rate`` to 16 kHz."""
    if not 1000 <= rate <= 768_000:
        raise DataError(f"a rate of {rate} Hz; use 1,000 to 768,000")
    if rate == RATE or not len(samples):
        return np.ascontiguousarray(samples, np.float32)
    return require("soxr").resample(samples, rate, RATE).astype(np.float32)


def write_audio(path: Path, samples: np.ndarray) -> None:
    """Write 16-bit samples at 16 kHz; the suffix chooses the format."""
    require("soundfile").write(str(path), np.clip(samples, -1, 1), RATE, subtype="PCM_16")
