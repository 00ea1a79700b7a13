"""Attention over a key/value cache of fixed shape, written only with tensor operations, for ``torch.export``.

:class:`~colonnade.model.attend.Paged` asks Python for pages and lengths, which a traced graph cannot. Here one sequence
has one cache of S slots per layer, slot p holds position p, and positions that are not written yet are masked. S may
differ from call to call: a caller passes as many slots as the sequence needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from colonnade.config import ModelConfig


def cache_row(config: ModelConfig) -> tuple[int, int, int]:
    """(1 for latents or 2 for keys and values, heads, width): the shape of one slot of a layer."""
    if config.latent is not None:
        return 1, 1, config.latent.kv_rank + config.latent.rope_width
    return 2, config.kv_heads, config.head_width


@dataclass(frozen=True)
class Static:
    """T new tokens of one sequence, the first of them at position ``start``."""

    cache_SpKH: Sequence[Tensor]
    """The cache of each layer, written in place; one slot is :func:`cache_row`."""
    start: Tensor
    """int64, a scalar tensor."""

    def at(self, layer: int, window: int | None) -> "StaticView":
        """The view of one layer."""
        return StaticView(self.cache_SpKH[layer], self.start, window)


@dataclass(frozen=True)
class StaticView:
    """One layer of a :class:`Static`."""

    caches: ClassVar[bool] = True

    cache_SpKH: Tensor
    start: Tensor
    window: int | None

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH; writes the new keys and values first."""
        cache, T, K = self.cache_SpKH, len(q_TnH), k_TkH.shape[1]
        positions_T = self.start + torch.arange(T)
        new_TpKH = torch.stack((k_TkH, v_TkH), 1) if cache.shape[1] == 2 else k_TkH[:, None]
        cache.index_copy_(0, positions_T, new_TpKH.to(cache.dtype))
        slots_S = torch.arange(cache.shape[0])
        seen_TS = slots_S <= positions_T[:, None]
        if self.window is not None:
            seen_TS = seen_TS & (slots_S > positions_T[:, None] - self.window)
        k_KSH, v_KSH = cache[:, 0].transpose(0, 1), cache[:, -1].transpose(0, 1)
        wide = torch.promote_types(q_TnH.dtype, torch.float32)  # a rounded score would be an error of a probability
        q_KTgH = (q_TnH.to(wide) * q_TnH.shape[-1] ** -0.5).unflatten(1, (K, -1)).transpose(0, 1)
        scores_KTgS = torch.einsum("ktgh,ksh->ktgs", q_KTgH, k_KSH.to(wide))
        scores_KTgS = scores_KTgS.masked_fill(~seen_TS[:, None], float("-inf"))
        o_KTgH = torch.einsum("ktgs,ksh->ktgh", scores_KTgS.softmax(-1).to(q_TnH.dtype), v_KSH)
        return o_KTgH.transpose(0, 1).flatten(1, 2)
