"""Sound of any file at 16 kHz, one channel, float32: soundfile reads it, PyAV what soundfile cannot, soxr resamples.

A compressed file of megabytes may hold gigabytes of samples, and its header may say otherwise. So files are decoded,
mixed and resampled by blocks, and the samples are counted as they come: memory is that of the result, 64 kB a second.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import DataError
from colonnade.speech.pcm import RATE, Resampler, require

LONGEST_S = 4 * 3600
"""Longest recording that is read at once."""
MOST_RATE = 96_000
"""Samples a second, all channels together, that a recording of the greatest length may have."""
BLOCK_SAMPLES = 1 << 18
"""Samples that are decoded at a time, all channels together."""
UNKNOWN = 1 << 62
"""soundfile's number of frames of a file whose header has none, which it cannot read by blocks."""
FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,mp3,aac,ogg,flac,wav,w64,aiff,au,caf,amr,ac3,eac3,avi,asf,flv,mpeg,mpegts"
)
"""Containers that FFmpeg opens: none of them names other files."""


def load_audio(path: str | Path, *, longest_s: float = LONGEST_S) -> Tensor:
    """float32 samples of ``path`` at 16 kHz, the mean of its channels.

    Raises :class:`DataError` for what holds no sound, is longer than ``longest_s``, or has more samples than
    ``longest_s`` at :data:`MOST_RATE`.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} does not exist; give an audio or video file")
    soundfile = require("soundfile")
    try:
        with soundfile.SoundFile(str(path)) as file:
            if file.frames >= UNKNOWN:
                return _decode(path, longest_s)
            _check_length(path, file.frames, file.samplerate, file.channels, longest_s)  # if its header is right
            return _joined(path, _blocks(file), file.samplerate, file.channels, longest_s)
    except soundfile.LibsndfileError:
        return _decode(path, longest_s)


def _blocks(file: Any) -> Iterator[np.ndarray]:
    """Mono blocks of an open SoundFile."""
    frames = max(1, BLOCK_SAMPLES // file.channels)
    while len(block_FC := file.read(frames, dtype="float32", always_2d=True)):
        yield block_FC.mean(axis=1)


def _joined(path: Path, blocks: Iterator[np.ndarray], rate: int, channels: int, longest_s: float) -> Tensor:
    """The blocks of ``path`` at 16 kHz, checked as they come."""
    resampler, found, frames = Resampler(rate), bytearray(), 0
    for mono in blocks:
        frames += len(mono)
        _check_length(path, frames, rate, channels, longest_s)
        if not np.isfinite(mono).all():
            raise DataError(f"{path} has samples that are not finite; convert it again")
        found += resampler.push(mono).tobytes()
    if not frames:
        raise DataError(f"{path} has no samples; give a longer recording")
    found += resampler.finish().tobytes()
    return torch.frombuffer(found, dtype=torch.float32) if found else torch.zeros(0)


def _decode(path: Path, longest_s: float) -> Tensor:
    """The sound of a video or of a compressed file, by PyAV."""
    av = require("av")
    try:
        with av.open(str(path), options={"format_whitelist": FORMATS}) as container:
            if not container.streams.audio:
                raise DataError(f"{path} has no sound; give an audio file, or a video with sound")
            stream = container.streams.audio[0]
            rate = int(stream.rate)
            resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
            parts = (
                part.to_ndarray().reshape(-1)
                for frame in container.decode(stream)
                for part in resampler.resample(frame)
            )
            return _joined(path, parts, rate, 1, longest_s)
    except (av.FFmpegError, ValueError) as why:
        raise DataError(f"{path} is no audio that can be read: {why}; convert it to WAV or FLAC") from None


def _check_length(path: Path, frames: int, rate: int, channels: int, longest_s: float) -> None:
    if (seconds := frames / max(1, rate)) > longest_s:
        raise DataError(f"{path} is {_length(seconds)} long or more, and {_length(longest_s)} are read; cut it")
    if (samples := frames * channels) > longest_s * MOST_RATE:
        raise DataError(
            f"{path} has {samples:,} samples or more in {channels} channels, at most {round(longest_s * MOST_RATE):,} "
            f"are read; convert it to mono at {RATE:,} Hz"
        )


def _length(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds:.0f} s"
