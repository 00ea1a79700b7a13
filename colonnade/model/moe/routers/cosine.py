"""Cosine scores: tokens and experts are compared on a sphere, where they collapse less (Chi 2022, arXiv 2204.09179).

    logits = normalise(W_p x) · normalise(S_e) · exp(min(τ, ln 100))        then as softmax does

W_p projects to a smaller width, each expert has a point S_e there, and the temperature exp(−τ) is learned, from
``moe.router.temperature`` on (Tutel's cosine_top).
"""

import math

from torch.nn import functional as F

from colonnade.config import ModelConfig, MoeConfig
from colonnade.model.moe.router import RouterInput, RouterOutput, RouterParameter, router
from colonnade.model.moe.routers.softmax import softmax_top_k


def _own(config: ModelConfig, moe: MoeConfig) -> dict[str, RouterParameter]:
    width = moe.router.projection
    return {
        "project": RouterParameter((width, config.width)),
        "experts": RouterParameter((moe.experts, width)),
        "temperature": RouterParameter((1,), math.log(1 / moe.router.temperature)),
    }


@router("cosine", _own, gate=False, biased=True)
def cosine(seen: RouterInput) -> RouterOutput:
    """The A experts at the smallest angle."""
    towards = F.normalize(F.linear(seen.x_TD, seen.own["project"]), dim=1)
    points = F.normalize(seen.own["experts"], dim=1)
    clean_TE = F.linear(towards, points) * seen.own["temperature"].clamp(max=math.log(100)).exp()
    logits_TE = seen.noisy(clean_TE)
    return softmax_top_k(seen, logits_TE, clean_TE)._replace(logits_TE=logits_TE)
