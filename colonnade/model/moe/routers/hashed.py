"""Hash router: experts by a hash of the token's id; nothing is learned (Roller 2021, arXiv 2106.04426).

    i = the A experts of the highest hash(token, expert)        w = 1/A

The hash is dropout's, under a fixed key, so every layer, run and layout sends a token to the same experts.
"""

import torch

from colonnade.kernels.dropout import uniform
from colonnade.model.moe.router import RouterInput, RouterOutput, router

_KEY, _SITE = 0x5EED, 0


@router("hash", gate=False, per_token=True, needs_token_ids=True)
def hashed(inputs: RouterInput) -> RouterOutput:
    """A experts by the token's id, with equal weights; balance losses have no gradient here."""
    E, A = inputs.moe.experts, inputs.moe.active
    key = torch.full((), _KEY, device=inputs.tokens_T.device)  # no copy from the host, which would wait
    hash_TE = uniform(key, inputs.tokens_T, E, _SITE)
    ids_TA = hash_TE.sort(dim=1, descending=True, stable=True).indices[:, :A]
    share = 1 / A if inputs.moe.router.normalise else 1.0
    weights_TA = inputs.logits_TE.new_full(ids_TA.shape, share * inputs.moe.router.scale)
    probs_TE = torch.zeros_like(inputs.logits_TE).scatter(1, ids_TA, 1 / A)
    return RouterOutput(ids_TA, weights_TA, probs_TE)
