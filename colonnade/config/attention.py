"""Sections of the model's configuration about attention: latent attention and the scaling of rotary frequencies."""

from typing import Literal

from pydantic import Field

from colonnade.config.base import MAX_DIM, Config


class LatentConfig(Config):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are computed from one
    short vector per token. The model's head_width is that of queries and keys, rotary part included.
    """

    kv_rank: int = Field(gt=0, le=MAX_DIM)
    """Width of the compressed vector from which the keys and values of all heads are computed."""
    rope_width: int = Field(gt=0, le=MAX_DIM)
    """Width of the rotary part at the end of each query and key head; all heads share the keys' rotary part."""
    v_width: int = Field(gt=0, le=MAX_DIM)
    """Width of a value head."""
    q_rank: int = Field(default=0, ge=0, le=MAX_DIM)
    """Width of the compressed vector from which the queries of all heads are computed; 0: queries are projected from
    the token directly."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Added to the variance when the two compressed vectors are normalised."""

    def projection_parameters(self, width: int, heads: int, head_width: int) -> int:
        """Parameters in the attention matrices of one layer of a model of these sizes."""
        q = (width + heads * head_width) * self.q_rank if self.q_rank else width * heads * head_width
        up = head_width - self.rope_width + self.v_width
        kv = width * (self.kv_rank + self.rope_width) + self.kv_rank * heads * up
        return q + kv + heads * self.v_width * width

    def norm_and_bias_parameters(self, *, bias: bool) -> int:
        """Parameters in the norms and biases of the two compressed vectors."""
        return (1 + bias) * (self.q_rank + self.kv_rank) + bias * self.rope_width


class RopeScaling(Config):
    """Scaling of the rotary frequencies for contexts longer than the one of the first training."""

    kind: Literal["linear", "llama3", "yarn"]
    """linear: positions divided by the factor (Chen 2023). llama3: by frequency band (Llama 3.1).
    yarn: NTK by parts with an attention temperature (Peng 2023)."""
    factor: float = Field(gt=0)
    """The new context divided by the original one."""
    original_context: int = Field(default=8192, gt=0, le=MAX_DIM)
    """Context of the first training [tokens]."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """llama3: frequencies of wavelengths above original_context / this are divided by the whole factor."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """llama3: frequencies of wavelengths below original_context / this are unchanged."""
    beta_fast: float = Field(default=32.0, gt=0)
    """yarn: frequencies with more rotations than this within the original context are unchanged."""
    beta_slow: float = Field(default=1.0, gt=0)
    """yarn: frequencies with fewer rotations than this are divided by the whole factor."""
    attention_factor: float | None = Field(default=None, gt=0)
    """yarn: multiplies cos and sin; None computes 0.1·ln(factor) + 1 (or mscale's ratio)."""
    mscale: float | None = Field(default=None, ge=0)
    """yarn, DeepSeek's variant: coefficient in the numerator of the attention temperature."""
    mscale_all_dim: float | None = Field(default=None, ge=0)
    """yarn, DeepSeek's variant: coefficient in the denominator of the attention temperature."""
    truncate: bool = True
    """yarn: round the two ends of the frequency band to whole dimensions, as the authors' code does."""
