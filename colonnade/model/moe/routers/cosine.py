"""Cosine router: tokens and experts are compared on a sphere, which reduces collapse (Chi 2022, arXiv 2204.09179).

    logits = normalise(W_p x) · normalise(S_e) · exp(min(τ, ln 100))        then as the softmax router

W_p projects to a smaller width, S_e is each expert's embedding there, and the temperature exp(−τ) is learned, starting
at ``moe.router.temperature`` (Tutel's cosine_top).
"""

import math

from torch.nn import functional as F

from colonnade.config import ModelConfig, MoeConfig
from colonnade.model.moe.router import RouterInput, RouterOutput, RouterParameter, router
from colonnade.model.moe.routers.softmax import softmax_top_k


def _parameters(config: ModelConfig, moe: MoeConfig) -> dict[str, RouterParameter]:
    width = moe.router.projection
    return {
        "project": RouterParameter((width, config.width)),
        "experts": RouterParameter((moe.experts, width)),
        "temperature": RouterParameter((1,), math.log(1 / moe.router.temperature)),
    }


@router("cosine", _parameters, gate=False, biased=True, per_token=True)
def cosine(inputs: RouterInput) -> RouterOutput:
    """The A experts at the smallest angle."""
    projected = F.normalize(F.linear(inputs.x_TD, inputs.parameters["project"]), dim=1)
    experts = F.normalize(inputs.parameters["experts"], dim=1)
    clean_TE = F.linear(projected, experts) * inputs.parameters["temperature"].clamp(max=math.log(100)).exp()
    logits_TE = inputs.noisy(clean_TE)
    return softmax_top_k(inputs, logits_TE, clean_TE)._replace(logits_TE=logits_TE)
