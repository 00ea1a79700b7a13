"""Whisper's spectrograms (arXiv 2212.04356, section 2.2; the sizes are those of the authors' code).

16 kHz mono audio, windows of 400 samples (Hann) every 160, power in mel bands, logarithm to base 10, cut 8 below the
maximum, (x + 4) / 4. The mel scale is Slaney's: linear below 1 kHz (200/3 Hz per band), logarithmic above (27 steps for
a factor of 6.4); each band is a triangle of area 1.
"""

import math
from functools import cache

import torch
from torch import Tensor

RATE = 16_000
"""Samples per second."""
WINDOW, HOP = 400, 160
_LINEAR_HZ, _BREAK_HZ, _LOG_STEP = 200 / 3, 1000.0, math.log(6.4) / 27


def _to_hz(mel: Tensor) -> Tensor:
    first = _BREAK_HZ / _LINEAR_HZ
    return torch.where(mel < first, mel * _LINEAR_HZ, _BREAK_HZ * torch.exp(_LOG_STEP * (mel - first)))


@cache
def mel_filters(bands: int, fft: int = WINDOW) -> Tensor:
    """float64 (bands, fft / 2 + 1): the weight of each frequency in each band."""
    top = _BREAK_HZ / _LINEAR_HZ + math.log(RATE / 2 / _BREAK_HZ) / _LOG_STEP
    edges = _to_hz(torch.linspace(0, top, bands + 2, dtype=torch.float64))
    frequencies = torch.linspace(0, RATE / 2, fft // 2 + 1, dtype=torch.float64)
    low, peak, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = torch.minimum((frequencies - low) / (peak - low), (high - frequencies) / (high - peak))
    return triangles.clamp(min=0) * 2 / (high - low)


def log_mel(samples: Tensor, bands: int) -> Tensor:
    """float32 (bands, frames) of audio whose length is a multiple of :data:`HOP`."""
    window = torch.hann_window(WINDOW, dtype=samples.dtype)
    spectrum = torch.stft(samples, WINDOW, HOP, window=window, center=True, return_complex=True)
    power = spectrum[:, :-1].abs().square()
    logs = (mel_filters(bands).to(samples.dtype) @ power).clamp(min=1e-10).log10()
    return ((torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0).float()
