"""The front end of the cache-aware Conformer (arXiv 2312.17279, section 3): spectra, subsampled by causal convolutions.

Spectrum m is of the 400 samples around sample 160·m, emphasised (x_t − 0.97 x_{t−1}): log(mel + 2⁻²⁴), mel bands of
area 1 on Slaney's scale. Then log₂ f stages, each of stride 2 and kernel 3 in time and frequency:

    stage 1     relu(conv x)                              1 channel to C
    others      relu(pointwise(depthwise x))              C channels
    output      W [channels × bands left]                 one vector every f spectra

Output i of a stage reads its inputs 2i − 2, 2i − 1 and 2i; inputs before the first and after the last are 0. So frame t
reads the 2f − 1 spectra that end with spectrum f·t. Each frame is computed from those alone, whole or streamed, which
computes some rows of the first stages twice; a row that is before the beginning or after the end is marked in the
features, because 0 goes into the next stage in its place.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config.speech import SPECTRUM_SAMPLES as HOP
from colonnade.config.speech import SpeechConfig
from colonnade.speech import log_mel

WINDOW, FFT, EMPHASIS, FLOOR = 400, 512, 0.97, 2.0**-24
KERNEL, STRIDE = 3, 2


def stage_rows(factor: int) -> list[int]:
    """Rows that a frame needs of the spectra and of each stage but the last: 15, 7, 3 for a factor of 8."""
    rows = [1]
    while 2 ** len(rows) <= factor:
        rows.append(STRIDE * (rows[-1] - 1) + KERNEL)
    return rows[:0:-1]


class SubsampledFeatures:
    """The spectra of each frame, one after another, then which rows of the later stages exist."""

    samples: ClassVar[bool] = False

    def __init__(self, config: SpeechConfig, dtype: torch.dtype = torch.float32):
        self.dtype, self.mels, self.factor = dtype, config.mels, config.subsampling
        self.rows = stage_rows(self.factor)
        self.frame = config.frame_samples
        self.filters = log_mel.mel_filters(config.mels, FFT).T.to(dtype)
        reach = (self.rows[0] - 1) * HOP + WINDOW + 1
        self.before = reach - self.frame
        """Samples of a frame's reach that the frame before reaches too."""
        self.start = (self.rows[0] - 1) * HOP + WINDOW // 2 + 1
        """Zeros before the first sample: frame 0 reaches half a window beyond sample 0."""
        self.spectra = self.rows[0] * self.mels
        """Width of the spectra in the features."""
        self.width = self.spectra + sum(self.rows[1:])

    def frames(self, samples: int) -> int:
        """Frames of a recording: as many as its whole spectra need."""
        return 1 - (1 - max(1, samples // HOP)) // self.factor if samples else 0

    def __call__(self, samples: Tensor, first: int = 0, total: int | None = None) -> Tensor:
        """(T, width) of the frames from ``first`` on; ``samples`` begin where the first one's reach does.

        ``total`` is the recording's number of samples, once it is known.
        """
        T = (len(samples) - self.before) // self.frame
        if T < 1:
            return samples.new_zeros(0, self.width)
        samples = samples[: self.before + T * self.frame]
        emphasised = samples[1:] - EMPHASIS * samples[:-1]
        if total is not None:
            place = torch.arange(len(emphasised)) + first * self.frame - self.start + 1
            emphasised = torch.where(place < total, emphasised, 0.0)
        window = torch.hann_window(WINDOW, periodic=False, dtype=samples.dtype)
        power = torch.fft.rfft(emphasised.unfold(0, WINDOW, HOP) * window, FFT).abs().square()
        mel_MF = (power @ self.filters.to(samples) + FLOOR).log()
        frame_T1 = torch.arange(first, first + T)[:, None]
        count, step, found = None if total is None else max(1, total // HOP), self.factor, list[Tensor]()
        for rows in self.rows:
            row_TR = frame_T1 * step - rows + 1 + torch.arange(rows)
            exists_TR, step = row_TR >= 0, step // STRIDE
            if count is not None:
                exists_TR, count = exists_TR & (row_TR < count), count // STRIDE + 1
            found.append(exists_TR)
        spectra_TRF = mel_MF.unfold(0, self.rows[0], self.factor).transpose(1, 2)
        spectra_TRF = torch.where(found[0][:, :, None], spectra_TRF, 0.0)
        return torch.cat((spectra_TRF.flatten(1), *(x.to(samples.dtype) for x in found[1:])), 1)


class Subsampling(nn.Module):
    """:class:`SubsampledFeatures` to (T, width)."""

    def __init__(self, config: SpeechConfig):
        super().__init__()
        C, bands = config.subsampling_channels, config.mels
        self.rows, self.mels = stage_rows(config.subsampling), config.mels
        for _ in self.rows:
            bands = (bands + KERNEL - 1 + STRIDE - 1 - KERNEL) // STRIDE + 1
        self.first = nn.Conv2d(1, C, KERNEL, STRIDE)
        self.depthwise = nn.ModuleList(nn.Conv2d(C, C, KERNEL, STRIDE, groups=C) for _ in self.rows[1:])
        self.pointwise = nn.ModuleList(nn.Conv2d(C, C, 1) for _ in self.rows[1:])
        self.out = nn.Linear(C * bands, config.width)
        self.factor = config.width**0.5 if config.scale_input else 1.0

    def forward(self, sound_TA: Tensor) -> Tensor:
        """One vector per frame."""
        spectra, *found = sound_TA.split([self.rows[0] * self.mels, *self.rows[1:]], 1)
        x_TCRF = self.first(self._pad(spectra.unflatten(1, (1, self.rows[0], self.mels))))
        for depthwise, pointwise, found_TR in zip(self.depthwise, self.pointwise, found, strict=True):
            x_TCRF = torch.relu(x_TCRF * found_TR[:, None, :, None])
            x_TCRF = pointwise(depthwise(self._pad(x_TCRF)))
        return self.factor * self.out(torch.relu(x_TCRF).squeeze(2).flatten(1))

    @staticmethod
    def _pad(x_TCRF: Tensor) -> Tensor:
        """Pad in frequency only; the rows are complete."""
        return F.pad(x_TCRF, (KERNEL - 1, STRIDE - 1))
