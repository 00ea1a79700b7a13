"""The key/value cache: pages of a fixed number of tokens, one pair of pools a layer (Kwon et al., arXiv 2309.06180)."""

import torch

from colonnade.config import ModelConfig
from colonnade.parallel.axis import SOLO_AXES, Axes


class KVCache:
    """``k[i]`` and ``v[i]`` of layer i: (pages, page_tokens, K/tp, H). Who owns which is the scheduler's affair.

    Latent attention keeps one vector for all heads, on every rank, which is key and value in one (``v[i] is k[i]``).
    """

    def __init__(
        self,
        config: ModelConfig,
        axes: Axes = SOLO_AXES,
        *,
        pages: int,
        page_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.pages, self.page_tokens = pages, page_tokens
        shape = (pages, page_tokens, *_head_shape(config, axes))
        # Zeros, not empty: a masked-out key times a weight of zero must not be NaN.
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.v = self.k if config.latent else [torch.zeros_like(k) for k in self.k]
        self.values = config.latent.kv_rank if config.latent else None
        """Of a cached vector, how many numbers are its value; None: those of ``v``."""

    @staticmethod
    def bytes_per_page(config: ModelConfig, axes: Axes, page_tokens: int, dtype: torch.dtype) -> int:
        """Memory of one page over all layers on one rank [bytes]."""
        heads, width = _head_shape(config, axes)
        return (1 if config.latent else 2) * config.layers * page_tokens * heads * width * dtype.itemsize

    @property
    def bytes(self) -> int:
        """Memory of the whole cache on this rank [bytes]."""
        return sum(t.nbytes for t in (self.k if self.v is self.k else (*self.k, *self.v)))


def _head_shape(config: ModelConfig, axes: Axes) -> tuple[int, int]:
    """(heads, width) of what one rank keeps of a token in one layer."""
    if config.latent:
        return 1, config.latent.kv_rank + config.latent.rope_width
    return config.kv_heads // axes.tp.size, config.head_width
