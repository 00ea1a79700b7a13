"""Loads audio from any file as mono float32 at 16 kHz: read by soundfile, otherwise by PyAV, and resampled by soxr.

A compressed file of megabytes may contain gigabytes of samples, and its header may be wrong. So files are decoded,
mixed and resampled in blocks, and the samples are counted while decoding: memory is that of the result, 64 kB per
second of audio.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import DataError
from colonnade.speech.pcm import RATE, Resampler, require

MAX_LENGTH_S = 4 * 3600
"""Maximum length of a recording [s]."""
MAX_RATE = 96_000
"""Maximum samples per second, over all channels, of a recording of maximum length."""
BLOCK_SAMPLES = 1 << 18
"""Samples decoded at a time, over all channels."""
UNKNOWN = 1 << 62
"""soundfile's frame count for a file whose header has none; it cannot read such a file in blocks."""
FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,mp3,aac,ogg,flac,wav,w64,aiff,au,caf,amr,ac3,eac3,avi,asf,flv,mpeg,mpegts"
)
"""Containers that FFmpeg may open: none of them can reference other files."""


def load_audio(path: str | Path, *, longest_s: float = MAX_LENGTH_S) -> Tensor:
    """float32 samples of ``path`` at 16 kHz, the mean of its channels.

    Raises :class:`DataError` for a file without audio, longer than ``longest_s``, or with more samples than
    ``longest_s`` at :data:`MAX_RATE`.
    """
    path = Path(path)
    try:
        exists = path.is_file()
    except OSError as why:  # a name that is too long, a folder that may not be read
        raise DataError(f"{path} cannot be read: {why.strerror}; use an audio or video file") from None
    if not exists:
        raise DataError(f"{path} does not exist; use an audio or video file")
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
    """The blocks of ``path`` resampled to 16 kHz, each checked while decoding."""
    resampler, found, frames = Resampler(rate), bytearray(), 0
    for mono in blocks:
        frames += len(mono)
        _check_length(path, frames, rate, channels, longest_s)
        if not np.isfinite(mono).all():
            raise DataError(f"{path} has samples that are not finite; convert it again")
        found += resampler.push(mono).tobytes()
    if not frames:
        raise DataError(f"{path} has no samples; use a longer recording")
    found += resampler.finish().tobytes()
    return torch.frombuffer(found, dtype=torch.float32) if found else torch.zeros(0)


def _decode(path: Path, longest_s: float) -> Tensor:
    """Decodes the audio of a video or of a compressed file with PyAV."""
    av = require("av")
    try:
        with av.open(str(path), options={"format_whitelist": FORMATS}) as container:
            if not container.streams.audio:
                raise DataError(f"{path} has no sound; use an audio file, or a video with sound")
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
        raise DataError(f"{path} cannot be read as audio: {why}; convert it to WAV or FLAC") from None


def _check_length(path: Path, frames: int, rate: int, channels: int, longest_s: float) -> None:
    if (seconds := frames / max(1, rate)) > longest_s:
        raise DataError(f"{path} is {_length(seconds)} long or more, and the limit is {_length(longest_s)}; cut it")
    if (samples := frames * channels) > longest_s * MAX_RATE:
        raise DataError(
            f"{path} has {samples:,} samples or more in {channels} channels, at most {round(longest_s * MAX_RATE):,} "
            f"are read; convert it to mono at {RATE:,} Hz"
        )


def _length(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds:.0f} s"
