"""Cached latents in 8 bits: what a token's vector becomes, where it goes, and what it stands for.

    [c; r] ≈ [c₈ s; r₈ z]          s and z one a token each, float32

c, the latent, went through a norm, and r, the rotary key beside it, did not: with one scale for both the larger would
cost the smaller its bits. Scales are a token's own, as rows of weights have theirs (:mod:`.linear.quantise` says how a
row is rounded), so that a token's bits depend on nobody else, and a page can be written token by token. Queries and
products stay in the model's type: only what is kept is rounded, once.
"""

from typing import Literal

import torch
from torch import Tensor

from colonnade.kernels.attention.kept import put, rows
from colonnade.kernels.linear.quantise import quantise

Kind = Literal["int8", "float8"]
DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
SCALES = 2
"""Of a token: of its latent, of its rotary key."""


def keep(k_TH: Tensor, rank: int, kind: Kind) -> tuple[Tensor, Tensor]:
    """(values_TH in ``kind``, scales_T2) of vectors whose first ``rank`` numbers are the latent; scales of vectors that
    are not finite are not.
    """
    c, r = (quantise(part, kind) for part in k_TH.split([rank, k_TH.shape[1] - rank], 1))
    return torch.cat((c.values, r.values), 1), torch.cat((c.scales, r.scales), 1)


def store(k_TH: Tensor, slots_T: Tensor, rank: int, k_Pp1H: Tensor, scales_Pp2: Tensor) -> None:
    """Keep tokens in these slots (page · page_tokens + offset) of a cache."""
    values_TH, scales_T2 = keep(k_TH, rank, kind_of(k_Pp1H))
    put(k_Pp1H.flatten(0, 1), slots_T, values_TH[:, None])
    scales_Pp2.flatten(0, 1).index_copy_(0, slots_T, scales_T2)


def kind_of(k_Pp1H: Tensor) -> Kind:
    """What a cache's latents are."""
    return "int8" if k_Pp1H.dtype == torch.int8 else "float8"


def written_out(values: Tensor, scales: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """What ``values`` (…, 1, H) with ``scales`` (…, 2) stand for, in ``dtype``; reckoned in float32 at least."""
    fine = torch.promote_types(dtype, torch.float32)
    c, r = values.to(fine).split([rank, values.shape[-1] - rank], -1)
    s, z = scales.to(fine).unsqueeze(-2).split(1, -1)
    return torch.cat((c * s, r * z), -1).to(dtype)


def gathered(values: Tensor, scales: Tensor, where: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """The same of some rows: positions of a cache, or its pages."""
    return written_out(rows(values, where), scales.index_select(0, where), rank, dtype)
