"""A hash of the token's id: nothing is learned, and nothing moves (Roller 2021, arXiv 2106.04426).

    i = the A experts of the highest hash(token, expert)        w = 1/A

The hash is that of dropout's noise under a fixed key, so every layer, run and layout sends a token to the same experts.
"""

import torch

from colonnade.kernels.dropout import uniform
from colonnade.model.moe.router import RouterInput, RouterOutput, router

_KEY, _SITE = 0x5EED, 0


@router("hash", gate=False)
def hashed(seen: RouterInput) -> RouterOutput:
    """A experts by the token's id alone, in equal parts; the balance losses see them, but nothing to move."""
    E, A = seen.moe.experts, seen.moe.active
    key = torch.full((), _KEY, device=seen.tokens_T.device)  # no copy from the host, which would wait
    hash_TE = uniform(key, seen.tokens_T, E, _SITE)
    ids_TA = hash_TE.sort(dim=1, descending=True, stable=True).indices[:, :A]
    share = 1 / A if seen.moe.router.normalise else 1.0
    weights_TA = seen.logits_TE.new_full(ids_TA.shape, share * seen.moe.router.scale)
    probs_TE = torch.zeros_like(seen.logits_TE).scatter(1, ids_TA, 1 / A)
    return RouterOutput(ids_TA, weights_TA, probs_TE)
