"""Log-mel spectra in frames of 40 ms, also while the sound arrives.

A spectrum is that of 400 samples (25 ms) under a Hann window, one each 10 ms. Frame t has the four that end within it
and ``history`` spectra before them; it needs nothing after sample 640·(t + 1). Filters are triangles on the mel scale
(2595·log₁₀(1 + f/700)).
"""

import torch
from torch import Tensor

from colonnade.errors import DataError

RATE = 16000
FRAME = 640
"""Samples of a frame."""
HOP, WINDOW, FFT = 160, 400, 512
FLOOR, MEAN, SCALE = 1e-6, -4.0, 0.25


def mel_filters(mels: int) -> Tensor:
    """(FFT/2 + 1, mels), float64."""
    bins = torch.linspace(0, RATE / 2, FFT // 2 + 1, dtype=torch.float64)
    top = 2595 * torch.log10(torch.tensor(1 + RATE / 2 / 700, dtype=torch.float64))
    edges = 700 * (10 ** (torch.linspace(0, float(top), mels + 2, dtype=torch.float64) / 2595) - 1)
    low, mid, high = edges[:-2], edges[1:-1], edges[2:]
    rising = (bins[:, None] - low) / (mid - low)
    falling = (high - bins[:, None]) / (high - mid)
    return torch.minimum(rising, falling).clamp(min=0)


def before(history: int) -> int:
    """Samples before a frame that its spectra read, with ``history`` spectra before its own."""
    return WINDOW - HOP + history * HOP


def log_mel(samples: Tensor, filters: Tensor, history: int = 0) -> Tensor:
    """(T, (history + 4)·mels) from :func:`before` samples and T whole frames of them."""
    T = (len(samples) - before(history)) // FRAME
    spectra = history + FRAME // HOP
    if T < 1:
        return samples.new_zeros(0, spectra * filters.shape[1])
    windows = samples[: before(history) + T * FRAME].unfold(0, WINDOW, HOP)
    shape = torch.hann_window(WINDOW, dtype=samples.dtype, device=samples.device)
    power = torch.fft.rfft(windows * shape, FFT).abs().square()
    mel = (power @ filters.to(samples)).clamp(min=FLOOR).log()
    return ((mel - MEAN) * SCALE).unfold(0, spectra, FRAME // HOP).transpose(1, 2).flatten(1)


class FrameStream:
    """Samples in runs of any length to spectra of whole frames; one stream."""

    def __init__(self, filters: Tensor, history: int = 0):
        self.filters, self.history = filters, history
        self.tail = torch.zeros(before(history), dtype=filters.dtype)

    def push(self, samples: Tensor) -> Tensor:
        """The frames that are complete now; keeps less than a frame, and what the next one reads."""
        samples = check_samples(samples).to(self.tail)
        waiting = torch.cat((self.tail, samples))
        T = (len(waiting) - before(self.history)) // FRAME
        self.tail = waiting[T * FRAME :].clone()
        return log_mel(waiting[: before(self.history) + T * FRAME], self.filters, self.history)

    def end(self) -> Tensor:
        """The last frame, filled up with silence, if samples are left."""
        left = len(self.tail) - before(self.history)
        return self.push(torch.zeros(FRAME - left if left else 0))


def check_samples(samples: Tensor) -> Tensor:
    """Raise DataError unless these are finite samples of one channel."""
    if samples.ndim != 1 or not samples.dtype.is_floating_point:
        raise DataError(f"samples of shape {tuple(samples.shape)} and {samples.dtype}; use one channel of floats")
    if not bool(torch.isfinite(samples).all()):
        raise DataError("samples with NaN or infinity; check the decoder")
    return samples
