"""Audio files as 16 kHz mono samples: WAV, FLAC, OGG and MP3 by soundfile, everything else (video too) by PyAV."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import DataError, RequestError
from colonnade.speech.log_mel import RATE

MAX_HOURS = 24
"""Longest file, so that a header cannot ask for more memory than there is."""


def load_audio(path: str | Path) -> Tensor:
    """float32 samples at 16 kHz, the mean of all channels.

    Raises :class:`DataError` for a file that is missing, empty or no audio, and :class:`RequestError` if the packages
    that read it are not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} does not exist; give an audio or video file")
    try:
        import soundfile
        import soxr
    except ImportError as missing:
        raise RequestError(f"reading audio needs {missing.name}: pip install 'colonnade[speech]'") from None
    try:
        with soundfile.SoundFile(path) as file:
            rate = file.samplerate
            if file.frames > MAX_HOURS * 3600 * rate:
                raise DataError(f"{path} says that it has {file.frames:,} samples, more than {MAX_HOURS} hours; cut it")
            sound_TC: Any = file.read(dtype="float32", always_2d=True)
        mono = sound_TC.mean(1)
    except soundfile.LibsndfileError:
        mono, rate = _decode(path)
    if not len(mono):
        raise DataError(f"{path} has no samples; give a longer recording")
    if not np.isfinite(mono).all():
        raise DataError(f"{path} has samples that are not finite; convert it again")
    return torch.from_numpy(np.ascontiguousarray(soxr.resample(mono, rate, RATE), np.float32))


def _decode(path: Path) -> tuple[np.ndarray, int]:
    """The first sound track, by FFmpeg's libraries."""
    try:
        import av
        from av.error import FFmpegError
    except ImportError:
        raise RequestError(f"{path} needs av to be read: pip install 'colonnade[speech]'") from None
    parts, samples = [], 0
    try:
        with av.open(str(path)) as container:
            if not container.streams.audio:
                raise DataError(f"{path} has no sound; give an audio file, or a video with sound")
            resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
            for frame in container.decode(audio=0):
                for piece in resampler.resample(frame):
                    parts.append(piece.to_ndarray()[0])
                    samples += len(parts[-1])
                if samples > MAX_HOURS * 3600 * RATE:
                    raise DataError(f"{path} is longer than {MAX_HOURS} hours; cut it")
    except FFmpegError as error:
        raise DataError(f"{path} is no audio that can be read: {error.strerror}; convert it to WAV or FLAC") from None
    return np.concatenate(parts) if parts else np.empty(0, np.float32), RATE
