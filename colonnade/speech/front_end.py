"""Audio and picture front ends and their fusion into x_TD, the encoder's input.

    sound     log-mel spectra, a few before the frame too -> linear SiLU linear         a_t
    pictures  convolution over the last pictures, convolution -> linear                 v_t
    subsampling    convolutions over spectra, sound only (:mod:`colonnade.speech.subsampling`)
    resnet    both by :mod:`colonnade.speech.resnet`, and a linear layer after fusion
    fusion    [v | a] -> LayerNorm -> 4D SiLU -> D        a missing modality is 0 (Ma et al., arXiv 2303.14307)

Segment attention has no positions, so motion within a frame's history must be encoded here. The first convolution reads
the frame's picture and those before it as channels, which is a convolution in three dimensions, causal in time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from colonnade.config.speech import SpeechConfig
from colonnade.errors import DataError
from colonnade.speech.resnet import OUTPUT_WIDTH, PictureResNet, SoundResNet
from colonnade.speech.subsampling import Subsampling


class Frames(NamedTuple):
    """The audio and pictures of T frames; ``None`` if no frame has the modality."""

    sound_TA: Tensor
    """:class:`colonnade.speech.features.Features`."""
    heard_T: Tensor | None = None
    """Frames that have audio; None: all."""
    pictures_seen: Tensor | None = None
    """For the frames that have a picture: the preceding pictures and then their own (:func:`stack_pictures`)."""
    seen_T: Tensor | None = None
    """Frames that have a picture; None: all, if there are pictures."""


class FrontEnd(nn.Module):
    """:class:`Frames` to x_TD."""

    def __init__(self, config: SpeechConfig):
        super().__init__()
        D, spectra = config.width, (config.audio_history + 4) * config.mels
        self.video = self.fusion = self.project = None
        if config.front_end == "resnet":
            self.audio, width = SoundResNet(), OUTPUT_WIDTH
            self.project = nn.Linear(OUTPUT_WIDTH, D)
            if config.picture:
                self.video = PictureResNet(config.picture_history)
        elif config.front_end == "subsampling":
            self.audio, width = Subsampling(config), D
        else:
            self.audio, width = nn.Sequential(nn.Linear(spectra, 2 * D), nn.SiLU(), nn.Linear(2 * D, D)), D
            if config.picture:
                left = ((config.picture - 5) // 2 + 1 - 3) // 2 + 1
                layers = nn.Conv2d(config.picture_history + 1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()
                self.video = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * left * left, D))
        if config.picture:
            hidden = config.fusion_width or 4 * D
            layers = nn.LayerNorm(2 * width), nn.Linear(2 * width, hidden), nn.SiLU(), nn.Linear(hidden, width)
            self.fusion = nn.Sequential(*layers)

    def forward(self, frames: Frames) -> Tensor:
        """x_TD."""
        x_TF = self.fuse(frames)
        return x_TF if self.project is None else self.project(x_TF)

    def fuse(self, frames: Frames) -> Tensor:
        """Fuses audio and pictures into one vector per frame."""
        a_TF = self.audio(frames.sound_TA)
        if frames.heard_T is not None:
            a_TF = torch.where(frames.heard_T[:, None], a_TF, 0.0)
        if self.video is None or self.fusion is None:
            if frames.pictures_seen is not None:
                raise DataError("this recogniser has no pictures; remove them, or train the preset speech-tiny-av")
            return a_TF
        v_TF = torch.zeros_like(a_TF)
        if frames.pictures_seen is not None:
            v_NF = self.video(frames.pictures_seen.to(a_TF.dtype))
            v_TF = v_NF if frames.seen_T is None else v_TF.index_put((frames.seen_T,), v_NF)
        return self.fusion(torch.cat((v_TF, a_TF), 1))


def join_frames(parts: Sequence[Frames]) -> Frames:
    """Concatenate ``parts``; either all or none of them define which frames have audio, or a picture."""

    def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
        given = [x for x in tensors if x is not None]
        return torch.cat(given) if given else None

    sound, *others = zip(*parts, strict=True)
    return Frames(torch.cat(sound), *map(joined, others))


def stack_pictures(pictures: Tensor, history: int) -> Tensor:
    """(T, history + 1, h, w): each of the last T of T + history pictures (h, w), preceded by its ``history``
    pictures.
    """
    return pictures.unfold(0, history + 1, 1).permute(0, 3, 1, 2)
