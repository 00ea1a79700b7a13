"""Rotary position embedding (RoPE): rotates each pair of a head's dimensions by an angle proportional to the position.

    (x₁, x₂) → (x₁ cos pθ − x₂ sin pθ,  x₂ cos pθ + x₁ sin pθ)        θ_i = base^(−2i/H)

(Su et al., arXiv 2104.09864, section 3.2; pairs are (i, i + H/2), as Llama's published weights expect.) Angles are
float32 whatever the model's dtype, as in the training of those weights. RoPE scaling changes θ only, when the model is
built:

    linear   θ / factor                                                  (Chen et al., arXiv 2306.15595)
    llama3   θ / factor for long wavelengths, θ for short, a blend between (Llama 3.1's reference configuration)
    yarn     the same blend by rotations within the original context, and cos and sin scaled by an attention
             temperature                                                 (Peng et al., arXiv 2309.00071, section 3.2)
"""

import math

import torch
from torch import Tensor

from colonnade.config import ModelConfig, RopeScaling


def frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """(θ float32 (H/2,) in radians per token, the factor on cos and sin) after scaling; H is the rotated width."""
    half = torch.arange(0, config.rotary_width, 2, dtype=torch.int64).float() / config.rotary_width
    theta = 1.0 / (config.rope_theta**half)
    match config.rope_scaling:
        case None:
            return theta, 1.0
        case RopeScaling(kind="linear") as scaling:
            return theta / scaling.factor, 1.0
        case RopeScaling(kind="llama3") as scaling:
            return _llama3(theta, scaling), 1.0
        case scaling:
            return _yarn(theta, scaling, config), _temperature(scaling)


def _llama3(theta: Tensor, scaling: RopeScaling) -> Tensor:
    wavelength = 2 * math.pi / theta
    long = scaling.original_context / scaling.low_freq_factor
    short = scaling.original_context / scaling.high_freq_factor
    keep = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = (1 - keep) * theta / scaling.factor + keep * theta
    return torch.where(wavelength > long, theta / scaling.factor, torch.where(wavelength < short, theta, blend))


def _yarn(theta: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    width = config.rotary_width

    def dimension(rotations: float) -> float:
        """The dimension whose pair makes this many rotations within the original context."""
        wavelength_ratio = scaling.original_context / (rotations * 2 * math.pi)
        return width * math.log(wavelength_ratio) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    slope = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - slope.clamp(0, 1)
    return theta / scaling.factor * (1 - keep) + theta * keep


def _temperature(scaling: RopeScaling) -> float:
    """YaRN's √(1/t) = 0.1·ln(factor) + 1, or DeepSeek's ratio of two such terms."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _term(scaling, scaling.mscale) / _term(scaling, scaling.mscale_all_dim)
    return _term(scaling, 1.0)


def _term(scaling: RopeScaling, mscale: float) -> float:
    return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def score_factor(scaling: RopeScaling | None) -> float:
    """DeepSeek's factor on attention scores under YaRN, without the temperature on cos and sin."""
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return _term(scaling, scaling.mscale_all_dim) ** 2
