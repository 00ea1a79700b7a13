"""Speech recognisers: sizes of the front ends, the encoder and the transducer.

The labels are letters, or pieces of words; label 0 is the blank.
"""

from itertools import product
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from colonnade.config.base import MAX_DIM, Config
from colonnade.config.model import ModelConfig
from colonnade.errors import ConfigError, DataError

LETTERS = " 'abcdefghijklmnopqrstuvwxyz"
"""The labels of English text; label 0 is the blank."""


WORD_START = "▁"
"""The prefix of a piece that begins a word."""
SPECTRUM_SAMPLES = 160
"""Samples from one spectrum to the next: 10 ms."""


class SpeechConfig(Config):
    """A transducer over frames of 40 ms (or as many spectra as are subsampled), with a streaming encoder."""

    family: Literal["emformer", "conformer"] = "emformer"
    """The encoder. conformer: the cache-aware Conformer, with causal convolutions and relative positions."""
    letters: str = Field(default=LETTERS, min_length=1, max_length=1 << 16)
    """Each character is a label, from 1 on."""
    pieces: tuple[str, ...] = Field(default=(), max_length=1 << 16)
    """Labels used instead of letters, from 1 on; those that begin with ▁ begin a word, those in <> have no text."""
    layers: int = Field(default=4, gt=0, le=1 << 10)
    """Blocks of the encoder."""
    width: int = Field(default=128, gt=0, le=MAX_DIM)
    """Width of the encoder."""
    heads: int = Field(default=4, gt=0, le=MAX_DIM)
    """Attention heads."""
    ffn_width: int = Field(default=512, gt=0, le=MAX_DIM)
    """Hidden units of a block's feed-forward layer."""
    conv_kernel: int = Field(default=9, gt=0, le=1 << 10)
    """Frames that a convolution of the Conformer reads: its own and those before."""
    conv_bias: bool = True
    """Biases of the Conformer's convolutions."""
    block_bias: bool = True
    """Biases of the encoder's attention and feed-forward layers."""
    joint_width: int = Field(default=128, gt=0, le=MAX_DIM)
    """Width of the joint network."""
    predictor: Literal["lstm", "stateless"] = "lstm"
    """The context of the predictor: all labels so far, or the last two."""
    predictor_layers: int = Field(default=1, gt=0, le=64)
    """Layers of the LSTM."""
    predictor_width: int | None = Field(default=None, gt=0, le=MAX_DIM)
    """Width of the predictor; None: the joint network's."""
    predictor_norm: bool = True
    """LayerNorm after the LSTM's embedding and after each of its layers."""
    letter_head: bool = True
    """A second head, which is trained together with the transducer and used for alignment."""
    max_labels: int = Field(default=5, gt=0, le=1 << 10)
    """Maximum number of labels that a search emits per frame."""
    front_end: Literal["small", "resnet", "subsampling"] = "small"
    """small: log-mel spectra, two convolutions a picture. resnet: ResNet-18 of samples and of pictures. subsampling:
    causal convolutions over log-mel spectra, sound only.
    """
    subsampling: Literal[4, 8] = 4
    """Spectra of a frame of the front end subsampling: frames of 40 or 80 ms."""
    subsampling_channels: int = Field(default=256, gt=0, le=MAX_DIM)
    """Channels of its convolutions."""
    scale_input: bool = False
    """Multiply the front end's output by √width."""
    fusion_width: int | None = Field(default=None, gt=0, le=MAX_DIM)
    """Hidden units of the fusion of sound and pictures; None: 4 × width."""
    mels: int = Field(default=80, gt=1, le=256)
    """Mel filters of the front ends small and subsampling; there is a spectrum each 10 ms."""
    audio_history: int = Field(default=8, ge=0, le=256)
    """Spectra before its own four that a frame of the front end small sees."""
    picture: int = Field(default=0, ge=0, le=256)
    """Height and width of the pictures of the mouth [pixels]; 0: sound only."""
    picture_history: int = Field(default=4, ge=0, le=64)
    """Pictures before its own that a frame sees."""
    segment: int = Field(default=8, gt=0, le=1 << 16)
    """S: frames that the encoder reads at once."""
    left: int = Field(default=16, ge=0, le=1 << 16)
    """L: frames before them that it sees; the Conformer whole segments of them, S·⌊L/S⌋."""
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
            raise ConfigError(f"width {self.width} is not divisible by {self.heads} heads; change one of them")
        for name, labels in (("letters", self.letters), ("pieces", self.pieces)):
            if len(set(labels)) != len(labels):
                twice = next(x for x in labels if labels.count(x) > 1)
                raise ConfigError(f"{name} has {twice!r} twice; remove one")
        if 0 < self.picture < 16:
            raise ConfigError(f"pictures of {self.picture} pixels are too small; use at least 16, or 0 for sound only")
        if self.front_end == "subsampling" and self.picture:
            raise ConfigError(
                "the front end subsampling does not support pictures; set picture to 0, or use another front end"
            )
        if self.family == "conformer":
            if self.right or self.memory or self.lookaheads:
                raise ConfigError(
                    f"the Conformer has neither look-ahead after a segment nor memories, but right is {self.right}, "
                    f"lookaheads {list(self.lookaheads)}, memory {self.memory}; set them to 0 and none: a frame sees "
                    "the rest of its segment"
                )
            if self.width % 2:
                raise ConfigError(f"width {self.width} is odd, and relative positions need an even one; change it")
        return self

    @property
    def frame_samples(self) -> int:
        """Samples of a frame at 16 kHz."""
        return SPECTRUM_SAMPLES * self.parts

    @property
    def parts(self) -> int:
        """Spectra of a frame, and labels of the letter head for it: one per 10 ms."""
        return self.subsampling if self.front_end == "subsampling" else 4

    @property
    def trained_segments(self) -> list[int]:
        """All trained values of S."""
        return sorted({self.segment, *self.segments})

    @property
    def trained_lookaheads(self) -> list[int]:
        """All trained values of R."""
        return sorted({self.right, *self.lookaheads})

    @property
    def trained_sizes(self) -> list[tuple[int, int, int, int]]:
        """(S, L, R, M) of all trained S and R."""
        pairs = product(self.trained_segments, self.trained_lookaheads)
        whole = self.family == "conformer"
        return [(S, self.left // S * S if whole else self.left, R, self.memory) for S, R in pairs]

    @property
    def vocab_size(self) -> int:
        """All labels and the blank."""
        return len(self.pieces or self.letters) + 1

    @property
    def encoder(self) -> ModelConfig:
        """The encoder's blocks."""
        return ModelConfig(
            vocab_size=self.vocab_size, layers=self.layers, width=self.width, heads=self.heads,
            ffn_width=self.ffn_width, norm="layernorm", gated=False,
            activation="relu" if self.family == "emformer" else "silu",
            qkv_bias=self.block_bias, out_bias=self.block_bias, ffn_bias=self.block_bias, init_std=0.05,
        )  # fmt: skip

    def labels(self, text: str) -> list[int]:
        """The labels of ``text``, with the longest pieces of each word first; raises DataError for an unknown
        character.
        """
        if self.pieces:
            return [label for word in text.split() for label in self._word_labels(word)]
        unknown = sorted(set(text) - set(self.letters))
        if unknown:
            raise DataError(
                f"{text[:60]!r} has {' and '.join(map(repr, unknown[:3]))}, and the recogniser's letters are "
                f"{self.letters!r}; spell the text in these"
            )
        return [self.letters.index(letter) + 1 for letter in text]

    def _word_labels(self, word: str) -> list[int]:
        rest, labels, number = WORD_START + word, list[int](), {piece: i for i, piece in enumerate(self.pieces, 1)}
        while rest:
            piece = next((rest[:n] for n in range(len(rest), 0, -1) if rest[:n] in number), None)
            if piece is None:
                raise DataError(f"{word!r}: the recogniser has no piece that {rest!r} begins with; change the text")
            labels.append(number[piece])
            rest = rest[len(piece) :]
        return labels

    def text(self, labels: list[int]) -> str:
        """The text of ``labels``; of pieces with a space before each word, the first too."""
        if not self.pieces:
            return "".join(self.letters[label - 1] for label in labels)
        pieces = [self.pieces[label - 1] for label in labels]
        spoken = [piece for piece in pieces if not (piece.startswith("<") and piece.endswith(">"))]
        return "".join(spoken).replace(WORD_START, " ")


SPEECH_PRESETS = {
    "speech-tiny": SpeechConfig(),
    "speech-tiny-av": SpeechConfig(picture=24),
    "av-small": SpeechConfig(
        layers=12, ffn_width=2048, heads=8, joint_width=1024, predictor_layers=3, predictor_width=512,
        front_end="resnet", fusion_width=3072, picture=88, segment=16, left=32, right=4,
    ),
    "av-large": SpeechConfig(
        layers=28, width=1024, ffn_width=4096, heads=8, joint_width=1024, predictor_layers=3, predictor_width=512,
        front_end="resnet", fusion_width=3072, picture=88, segment=16, left=32, right=4,
    ),
    "conformer-tiny": SpeechConfig(
        family="conformer", front_end="subsampling", subsampling_channels=32, scale_input=True, ffn_width=256,
        segment=8, left=24, right=0,
    ),
}  # fmt: skip
"""av-small and av-large are those of Ma et al. (arXiv 2303.14307) with letters as labels; their 12 and 28 blocks are
128 and 1,024 wide.
conformer-tiny is a cache-aware Conformer (Noroozi et al., arXiv 2312.17279) with letters as labels.
"""
