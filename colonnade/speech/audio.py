"""Sound of any file at 16 kHz, one channel, float32: soundfile reads it, PyAV what soundfile cannot, soxr resamples."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import DataError
from colonnade.speech.pcm import require, resample

LONGEST_S = 4 * 3600
"""Longest recording that is read at once."""


MOST_RATE = 96_000
"""Samples a second, all channels together, that a recording of the greatest length may have."""


FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,mp3,aac,ogg,flac,wav,w64,aiff,au,caf,amr,ac3,eac3,avi,asf,flv,mpeg,mpegts"
)
"""Containers that FFmpeg opens: none of them names other files."""


def load_audio(path: str | Path, *, longest_s: float = LONGEST_S) -> Tensor:
    """float32 samples of ``path`` at 16 kHz, the mean of its channels; raises DataError for what holds no sound."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} does not exist; give an audio or video file")
    soundfile = require("soundfile")
    try:
        info = soundfile.info(str(path))
        _check_length(path, info.frames / max(1, info.samplerate), longest_s)
        if info.frames * info.channels > longest_s * MOST_RATE:
            raise DataError(
                f"{path} has {info.frames * info.channels:,} samples, which are too many; convert it to mono"
            )
        samples, rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError:
        samples, rate = _decode(path, longest_s)
    if not samples.size:
        raise DataError(f"{path} has no samples; give a longer recording")
    mono = samples.mean(axis=1)
    if not np.isfinite(mono).all():
        raise DataError(f"{path} has samples that are not finite; convert it again")
    return torch.from_numpy(resample(mono, rate))


def _decode(path: Path, longest_s: float) -> tuple[np.ndarray, int]:
    """(samples × channels, rate) of a video or compressed sound, by PyAV."""
    av = require("av")
    try:
        with av.open(str(path), options={"format_whitelist": FORMATS}) as container:
            if not container.streams.audio:
                raise DataError(f"{path} has no sound; give an audio file, or a video with sound")
            stream = container.streams.audio[0]
            rate = int(stream.rate)
            resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
            parts: list[np.ndarray] = []
            total = 0
            for frame in container.decode(stream):
                for part in resampler.resample(frame):
                    parts.append(part.to_ndarray().reshape(-1))
                    total += len(parts[-1])
                    _check_length(path, max(total / rate, total / MOST_RATE), longest_s)
    except (av.FFmpegError, ValueError) as why:
        raise DataError(f"{path} is no audio that can be read: {why}; convert it to WAV or FLAC") from None
    samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    return samples[:, None], rate


def _check_length(path: Path, seconds: float, longest_s: float) -> None:
    if seconds > longest_s:
        raise DataError(f"{path} is {seconds / 3600:.1f} hours long or more, {longest_s / 3600:g} are read; cut it")
