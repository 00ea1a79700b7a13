"""Speech recognisers: sizes of the front ends, the encoder and the transducer."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from colonnade.config.base import MAX_DIM, Config
from colonnade.config.model import ModelConfig
from colonnade.errors import ConfigError, DataError

LETTERS = " 'abcdefghijklmnopqrstuvwxyz"
"""The labels of English text; label 0 is the blank."""


class SpeechConfig(Config):
    """A transducer over frames of 40 ms, with an Emformer encoder."""

    letters: str = Field(default=LETTERS, min_length=1, max_length=1 << 16)
    """Each character is a label, from 1 on."""
    layers: int = Field(default=4, gt=0, le=1 << 10)
    """Blocks of the encoder."""
    width: int = Field(default=128, gt=0, le=MAX_DIM)
    """Width of the encoder."""
    heads: int = Field(default=4, gt=0, le=MAX_DIM)
    """Attention heads."""
    ffn_width: int = Field(default=512, gt=0, le=MAX_DIM)
    """Hidden units of a block's feed-forward layer."""
    joint_width: int = Field(default=128, gt=0, le=MAX_DIM)
    """Width of the joint network."""
    predictor: Literal["lstm", "stateless"] = "lstm"
    """What labels so far the next one depends on: all, or the last two."""
    predictor_layers: int = Field(default=1, gt=0, le=64)
    """Layers of the LSTM."""
    predictor_width: int | None = Field(default=None, gt=0, le=MAX_DIM)
    """Width of the predictor; None: the joint network's."""
    front_end: Literal["small", "resnet"] = "small"
    """small: log-mel spectra, two convolutions a picture. resnet: ResNet-18 of samples and of pictures."""
    fusion_width: int | None = Field(default=None, gt=0, le=MAX_DIM)
    """Hidden units of the fusion of sound and pictures; None: 4 × width."""
    mels: int = Field(default=80, gt=1, le=256)
    """Mel filters of the front end small; a frame has four spectra, one each 10 ms."""
    audio_history: int = Field(default=8, ge=0, le=256)
    """Spectra before its own four that a frame of the front end small sees."""
    picture: int = Field(default=0, ge=0, le=256)
    """Height and width of the pictures of the mouth [pixels]; 0: sound only."""
    picture_history: int = Field(default=4, ge=0, le=64)
    """Pictures before its own that a frame sees."""
    segment: int = Field(default=8, gt=0, le=1 << 16)
    """S: frames that the encoder reads at once."""
    left: int = Field(default=16, ge=0, le=1 << 16)
    """L: frames before them that it sees."""
    right: int = Field(default=2, ge=0, le=1 << 16)
    """R: frames after them that it waits for."""
    memory: int = Field(default=0, ge=0, le=1 << 16)
    """M: summaries of earlier segments that it sees."""
    segments: tuple[Annotated[int, Field(gt=0, le=1 << 16)], ...] = ()
    """Further values of S that are trained, so that a stream may choose one; each training step draws S and R."""
    lookaheads: tuple[Annotated[int, Field(ge=0, le=1 << 16)], ...] = ()
    """Further values of R that are trained."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.width % self.heads:
            raise ConfigError(f"width {self.width} does not divide into {self.heads} heads; change one of them")
        if len(set(self.letters)) != len(self.letters):
            raise ConfigError(f"letters {self.letters!r} has a character twice; remove one")
        if 0 < self.picture < 16:
            raise ConfigError(f"pictures of {self.picture} pixels are too small; use at least 16, or 0 for sound only")
        return self

    @property
    def trained_segments(self) -> list[int]:
        """All trained values of S."""
        return sorted({self.segment, *self.segments})

    @property
    def trained_lookaheads(self) -> list[int]:
        """All trained values of R."""
        return sorted({self.right, *self.lookaheads})

    @property
    def vocab_size(self) -> int:
        """Letters and the blank."""
        return len(self.letters) + 1

    @property
    def encoder(self) -> ModelConfig:
        """The encoder's blocks."""
        return ModelConfig(
            vocab_size=self.vocab_size, layers=self.layers, width=self.width, heads=self.heads,
            ffn_width=self.ffn_width, norm="layernorm", gated=False, activation="relu",
            qkv_bias=True, out_bias=True, ffn_bias=True, init_std=0.05,
        )  # fmt: skip

    def labels(self, text: str) -> list[int]:
        """The labels of ``text``; raises DataError for a character that has none."""
        unknown = sorted(set(text) - set(self.letters))
        if unknown:
            raise DataError(f"{text[:60]!r} has {unknown[0]!r}, and the recogniser's letters are {self.letters!r}")
        return [self.letters.index(letter) + 1 for letter in text]

    def text(self, labels: list[int]) -> str:
        """The text of ``labels``."""
        return "".join(self.letters[label - 1] for label in labels)


SPEECH_PRESETS = {
    "speech-tiny": SpeechConfig(),
    "speech-tiny-av": SpeechConfig(picture=24),
    "av-small": SpeechConfig(
        layers=12, ffn_width=2048, heads=8, joint_width=1024, predictor_layers=3, predictor_width=512,
        front_end="resnet", fusion_width=3072, picture=88, segment=16, left=32, right=4,
    ),
}  # fmt: skip
"""av-small is that of Ma et al. (arXiv 2303.14307) with letters as labels; its 12 blocks are 128 wide."""
