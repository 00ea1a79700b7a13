"""Augments training recordings without changing their words: speeds, rooms, codecs, masks, crops.

A change of speed changes pitch and times by the same factor (Ko et al., Interspeech 2015); the others change no times.
Masks are SpecAugment's (Park et al., arXiv 1904.08779): runs of the audio are silenced, and bands of its spectra are
set to the recording's mean. Pictures are cropped and may be mirrored.
"""

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import DataError
from colonnade.speech.features import RATE
from colonnade.speech.pcm import require, resample

CODECS = {"pcm_mulaw": 8000, "pcm_alaw": 8000, "g722": 16000}
"""FFmpeg's names and rates [Hz] of telephone codecs; their delay is at most 2 ms."""
SPEEDS = (0.9, 1.0, 1.1)
"""Speeds, each for a third of the recordings."""
ROOM_SHARE, CODEC_SHARE = 0.3, 0.2
"""Shares of the recordings in a room, and through a codec."""
MASKS, LONGEST_MASK_S, WIDEST_MASK = 2, 0.2, 0.2
"""Number of masks of each kind, their maximum duration [s], and their maximum share of the mel bands."""
BORDER = 12 / 11
"""Ratio of the drawn to the cropped size of pictures: 96 for 88."""


def change_speed(samples: np.ndarray, speed: float) -> np.ndarray:
    """round(n / ``speed``) samples of ``samples`` played at this speed."""
    if speed == 1 or not len(samples):
        return samples
    changed = require("soxr").resample(samples, speed * RATE, RATE)
    count = round(len(samples) / speed)
    return np.pad(changed[:count], (0, max(0, count - len(changed))))


def augment_sound(samples: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Applies a room or a codec to a random part of the recordings."""
    if random.random() < ROOM_SHARE:
        samples = add_reverberation(samples, random)
    if random.random() < CODEC_SHARE:
        samples = codec(samples, list(CODECS)[random.integers(len(CODECS))])
    return samples


def add_reverberation(samples: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Adds echoes (noise that decays by 60 dB in 0.1 to 0.6 s), with the same loudness and without delay."""
    decay_s, ratio_db = random.uniform(0.1, 0.6), random.uniform(0, 12)
    times_s = np.arange(round(decay_s * RATE)) / RATE
    echoes = random.standard_normal(len(times_s)) * 10 ** (-3 * times_s / decay_s)
    echoes[times_s < 0.002] = 0
    impulse = echoes / np.sqrt(np.square(echoes).sum() * 10 ** (ratio_db / 10))
    impulse[0] = 1
    size = 1 << (len(samples) + len(impulse)).bit_length()
    heard = np.fft.irfft(np.fft.rfft(samples, size) * np.fft.rfft(impulse, size), size)[: len(samples)]
    power, heard_power = (float(np.square(x, dtype=np.float64).sum()) for x in (samples, heard))
    return (heard * np.sqrt(power / max(heard_power, 1e-12))).astype(np.float32)


def codec(samples: np.ndarray, name: str) -> np.ndarray:
    """Encodes and decodes the audio; raises DataError for a codec that is not in :data:`CODECS`."""
    if name not in CODECS:
        raise DataError(f"{name!r} is not a known codec; use one of {', '.join(CODECS)}")
    if not len(samples):
        return samples
    av, rate = require("av"), CODECS[name]
    narrow = samples if rate == RATE else require("soxr").resample(samples, RATE, rate)
    loudest = max(1.0, float(np.abs(narrow).max()))
    encoder, decoder = (av.CodecContext.create(name, mode) for mode in "wr")
    encoder.sample_rate = decoder.sample_rate = rate
    encoder.layout = decoder.layout = "mono"
    encoder.format = encoder.codec.audio_formats[0]
    fifo = av.AudioFifo()
    whole = av.AudioFrame.from_ndarray((narrow / loudest * 32767).round().astype(np.int16)[None], "s16", "mono")
    whole.sample_rate = rate
    resampler = av.AudioResampler(format=encoder.format, layout="mono", rate=rate)
    for frame in resampler.resample(whole):
        fifo.write(frame)
    encoder.open()
    packets: list[object] = []
    while (frame := fifo.read(encoder.frame_size or 0, partial=True)) is not None:
        packets += encoder.encode(frame)
    packets += encoder.encode(None)
    back = av.AudioResampler(format="s16", layout="mono", rate=rate)
    parts = [
        part.to_ndarray().reshape(-1)
        for packet in packets
        for frame in decoder.decode(packet)
        for part in back.resample(frame)
    ]
    wide = resample(np.concatenate(parts).astype(np.float32) / 32767 * loudest, rate)
    return np.pad(wide[: len(samples)], (0, max(0, len(samples) - len(wide))))


def mask_sound(samples: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Silences :data:`MASKS` runs of samples."""
    masked = samples.copy()
    for _ in range(MASKS):
        length = int(random.integers(0, min(round(LONGEST_MASK_S * RATE), len(samples) // 4) + 1))
        start = int(random.integers(0, len(samples) - length + 1))
        masked[start : start + length] = 0
    return masked


def mask_bands(spectra_TA: Tensor, mels: int, random: np.random.Generator) -> Tensor:
    """Sets :data:`MASKS` bands of (T, spectra · mels) to the recording's mean."""
    masked = spectra_TA.reshape(len(spectra_TA), -1, mels).clone()
    mean = masked.mean()
    for _ in range(MASKS):
        width = int(random.integers(0, round(WIDEST_MASK * mels) + 1))
        start = int(random.integers(0, mels - width + 1))
        masked[:, :, start : start + width] = mean
    return masked.reshape(spectra_TA.shape)


def crop_pictures(pictures: Tensor, size: int, random: np.random.Generator) -> Tensor:
    """Crops (T, h, w) to a square at a random place, the same for all pictures, and mirrors it half of the time."""
    top, left = (int(random.integers(0, n - size + 1)) for n in pictures.shape[1:])
    cut = pictures[:, top : top + size, left : left + size]
    return torch.flip(cut, (2,)) if random.random() < 0.5 else cut
