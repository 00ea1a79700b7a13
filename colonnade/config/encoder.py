"""The encoder of an encoder–decoder model, and relative position biases (T5)."""

from typing import Literal

from pydantic import Field

from colonnade.config.base import MAX_DIM, Config


class EncoderConfig(Config):
    """The encoder of an encoder–decoder; heads, widths, norms and activations are those of the decoder."""

    layers: int = Field(gt=0, le=1 << 20)
    """Encoder blocks."""
    ffn_width: int = Field(default=0, ge=0, le=MAX_DIM)
    """Hidden width of the encoder's feed-forward network; 0: the decoder's."""
    context: int = Field(default=512, gt=0, le=MAX_DIM)
    """Maximum source length [tokens; for audio, frames after the convolutions]."""
    reads: Literal["tokens", "audio"] = "tokens"
    """tokens: sources are token ids, embedded by the decoder's table. audio: log-mel spectrograms, which two
    convolutions turn into one vector per two frames (Whisper)."""
    start_token: int = Field(default=0, ge=0, le=MAX_DIM)
    """The token that begins every target."""
    languages: bool = False
    """Sources, and targets after start_token, begin with the token of their language (NLLB); a request names them."""
    first_k_dense_replace: int = Field(default=0, ge=0, le=1 << 20)
    """The first encoder block with experts, in a model with experts (model.moe)."""
    layer_freq: int = Field(default=1, ge=1, le=1 << 20)
    """From that one on, every n-th encoder block has experts."""
    mels: int = Field(default=80, gt=0, le=1 << 12)
    """Mel bands of a spectrogram (reads = audio)."""

    def has_experts(self, layer: int) -> bool:
        """Whether encoder block ``layer`` has experts, in a model with experts."""
        return layer >= self.first_k_dense_replace and (layer - self.first_k_dense_replace) % self.layer_freq == 0

    @property
    def expert_layers(self) -> int:
        """Encoder blocks with experts, in a model with experts."""
        return len(range(self.first_k_dense_replace, self.layers, self.layer_freq))


class RelativePositions(Config):
    """Learned biases of attention scores by bucketed distance (T5, arXiv 1910.10683, section 2.1)."""

    buckets: int = Field(default=32, ge=4, le=1 << 16)
    """Rows of the table. Half are exact distances, the others grow logarithmically; in an encoder half are for later
    keys."""
    distance: int = Field(default=128, gt=0, le=1 << 16)
    """All keys at this distance or farther share a bucket [tokens]."""
