"""Audio features in frames, for whole recordings and streams: log-mel spectra, or samples for a ResNet.

Every 10 ms there is a spectrum of 400 samples (25 ms) under a Hann window. Frame t contains the four spectra that end
within it and ``history`` spectra before them; it needs no sample after 640·(t + 1). Filters are triangles on the mel
scale (2595·log₁₀(1 + f/700)). :mod:`colonnade.speech.subsampling` has other spectra, and frames of 40 or 80 ms.
"""

import torch
from torch import Tensor

from colonnade.config.speech import SpeechConfig
from colonnade.errors import DataError
from colonnade.speech.resnet import HISTORY_SAMPLES
from colonnade.speech.subsampling import SubsampledFeatures

RATE = 16000
FRAME = 640
"""Samples of a frame of the front ends small and resnet."""
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


def samples_before(history: int) -> int:
    """Number of samples before a frame that its spectra read, including the ``history`` spectra."""
    return WINDOW - HOP + history * HOP


def log_mel(samples: Tensor, filters: Tensor, history: int = 0) -> Tensor:
    """(T, (history + 4)·mels) from :func:`samples_before` samples and T whole frames of them."""
    T = (len(samples) - samples_before(history)) // FRAME
    spectra = history + FRAME // HOP
    if T < 1:
        return samples.new_zeros(0, spectra * filters.shape[1])
    windows = samples[: samples_before(history) + T * FRAME].unfold(0, WINDOW, HOP)
    shape = torch.hann_window(WINDOW, dtype=samples.dtype, device=samples.device)
    power = torch.fft.rfft(windows * shape, FFT).abs().square()
    mel = (power @ filters.to(samples)).clamp(min=FLOOR).log()
    return ((mel - MEAN) * SCALE).unfold(0, spectra, FRAME // HOP).transpose(1, 2).flatten(1)


class Features:
    """The audio input of a front end: log-mel spectra, or the samples."""

    def __init__(self, config: SpeechConfig, dtype: torch.dtype = torch.float32):
        self.dtype = dtype
        self.history, self.filters = config.audio_history, mel_filters(config.mels).to(dtype)
        self.samples = config.front_end == "resnet"
        self.frame = FRAME
        self.before = self.start = HISTORY_SAMPLES if self.samples else samples_before(self.history)
        """Number of samples needed before a frame, and of zeros before the first."""
        self.spectra = spectra = (self.history + FRAME // HOP) * config.mels
        self.width = HISTORY_SAMPLES + FRAME if self.samples else spectra
        """Feature width of a frame."""

    def frames(self, samples: int) -> int:
        """Frames of a recording; the last one is padded."""
        return -(-samples // FRAME)

    def __call__(self, samples: Tensor, first: int = 0, total: int | None = None) -> Tensor:
        """(T, width) from ``samples_before`` samples and T whole frames of them; the index of the first does not
        matter.
        """
        if not self.samples:
            return log_mel(samples, self.filters, self.history)
        T = (len(samples) - self.before) // FRAME
        if T < 1:
            return samples.new_zeros(0, self.width)
        return samples[: self.before + T * FRAME].unfold(0, self.before + FRAME, FRAME)


AnyFeatures = Features | SubsampledFeatures


def features_of(config: SpeechConfig, dtype: torch.dtype = torch.float32) -> AnyFeatures:
    """The features that the recogniser's front end reads."""
    return (SubsampledFeatures if config.front_end == "subsampling" else Features)(config, dtype)


class FrameStream:
    """Converts one stream's samples, in pieces of any length, to features of whole frames."""

    def __init__(self, features: AnyFeatures):
        self.features = features
        self.tail = torch.zeros(features.start, dtype=features.dtype)
        self.samples = self.frames = 0
        """Samples received, frames returned."""

    def push(self, samples: Tensor) -> Tensor:
        """The frames that are complete now; keeps the incomplete frame and the samples that the next frame reads."""
        waiting = torch.cat((self.tail, check_samples(samples).to(self.tail)))
        self.samples += len(samples)
        return self._frames(waiting, max(0, len(waiting) - self.features.before) // self.features.frame, None)

    def end(self) -> Tensor:
        """The last frames, padded with silence, if samples are left."""
        own, T = self.features, self.features.frames(self.samples) - self.frames
        missing = max(0, own.before + T * own.frame - len(self.tail))
        return self._frames(torch.cat((self.tail, self.tail.new_zeros(missing))), T, self.samples)

    def _frames(self, waiting: Tensor, T: int, total: int | None) -> Tensor:
        own, first = self.features, self.frames
        self.frames += T
        self.tail = waiting[T * own.frame :].clone()
        return own(waiting[: own.before + T * own.frame], first, total)


def check_samples(samples: Tensor) -> Tensor:
    """Raise DataError unless these are finite samples of one channel."""
    if samples.ndim != 1 or not samples.dtype.is_floating_point:
        raise DataError(f"samples of shape {tuple(samples.shape)} and {samples.dtype}; use one channel of floats")
    if not bool(torch.isfinite(samples).all()):
        raise DataError("samples with NaN or infinity; check the decoder")
    return samples
