"""A paged key/value cache for your own models (Kwon et al., arXiv 2309.06180).

    cache = PagedCache(layers=2, kv_heads=2, head_width=64, pages=128)
    attend = cache.batch(pages=[[0, 1], [2]], lengths=[20, 3], new_tokens=[20, 1])
    o_TNH = attend.at(layer, None)(q_TNH, k_TKH, v_TKH)      # writes the new keys, attends to all of them

Without a cache, ``Packed.of([5, 7])(q, k, v)`` attends within two sequences of 5 and 7 tokens.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from colonnade.config import ModelConfig
from colonnade.errors import CapacityError, ConfigError
from colonnade.model.attend import Paged
from colonnade.model.cache import KVCache


class PagedCache(KVCache):
    """Keys and values of ``layers`` layers in pages; the caller assigns pages to requests."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_width: int,
        pages: int,
        *,
        page_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        """``kv_heads``: of this rank. Each page holds ``page_tokens`` tokens of every layer."""
        config = ModelConfig(
            vocab_size=1, layers=layers, width=kv_heads * head_width, heads=kv_heads, head_width=head_width,
            positions="learned", ffn_width=1,
        )  # fmt: skip
        super().__init__(config, pages=pages, page_tokens=page_tokens, dtype=dtype, device=device)

    def batch(
        self, pages: Sequence[Sequence[int]], lengths: Sequence[int], new_tokens: Sequence[int], kernels: str = "auto"
    ) -> Paged:
        """Return the attention of one forward pass.

        Request r has ``pages[r]`` and ``lengths[r]`` tokens, the last ``new_tokens[r]`` of them in this pass; the
        requests' new tokens are concatenated. Raises :class:`ConfigError` for contradictory numbers,
        :class:`CapacityError` where a request has too few pages.
        """
        if not len(pages) == len(lengths) == len(new_tokens):
            raise ConfigError(
                f"{len(pages)} page tables, {len(lengths)} lengths and {len(new_tokens)} counts of new tokens; pass "
                "one of each per request"
            )
        slots: list[int] = []
        for r, (table, length, new) in enumerate(zip(pages, lengths, new_tokens, strict=True)):
            if not 0 <= new <= length:
                raise ConfigError(f"request {r} has {new} new tokens of {length}; use 0 to {length}")
            if length > len(table) * self.page_tokens:
                raise CapacityError(
                    f"request {r} has {length} tokens and {len(table)} pages of {self.page_tokens}; it needs "
                    f"{-(-length // self.page_tokens)}"
                )
            if wrong := [page for page in table if not 0 <= page < self.pages]:
                raise ConfigError(
                    f"request {r} has page {wrong[0]} of a cache of {self.pages}; use 0 to {self.pages - 1}"
                )
            slots += [
                table[i // self.page_tokens] * self.page_tokens + i % self.page_tokens
                for i in range(length - new, length)
            ]
        widest, on = max(map(len, pages), default=0), self.k[0].device

        def tensor(values: list, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=on)

        padded = [[*table, *[0] * (widest - len(table))] for table in pages]
        return Paged(
            self,
            pages_RP=tensor(padded, torch.int32).view(len(pages), widest),
            slots_T=tensor(slots, torch.int64),
            cu_queries=tensor([0, *accumulate(new_tokens)], torch.int32),
            lengths_R=tensor(list(lengths), torch.int32),
            longest_query=max(new_tokens, default=0),
            longest_context=max(lengths, default=0),
            kernels=kernels,
            known=(list(new_tokens), list(lengths)),
            known_pages=[list(table) for table in pages],
        )
