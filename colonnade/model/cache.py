"""The key/value cache: pages of a fixed number of tokens, one pair of pools a layer (Kwon et al., arXiv 2309.06180)."""

import torch

from colonnade.config import ModelConfig
from colonnade.parallel.axis import SOLO_AXES, Axes


class KVCache:
    """``k[i]`` and ``v[i]`` of layer i: (pages, page_tokens, K/tp, H). Who owns which is the scheduler's affair."""

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
        shape = (pages, page_tokens, config.kv_heads // axes.tp.size, config.head_width)
        # Zeros, not empty: a masked-out key times a weight of zero must not be NaN.
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]

    @staticmethod
    def bytes_per_page(config: ModelConfig, axes: Axes, page_tokens: int, dtype: torch.dtype) -> int:
        """Memory of one page over all layers on one rank [bytes]."""
        return 2 * config.layers * page_tokens * (config.kv_heads // axes.tp.size) * config.head_width * dtype.itemsize

    @property
    def bytes(self) -> int:
        """Memory of the whole cache on this rank [bytes]."""
        return sum(t.nbytes for t in (*self.k, *self.v))
