"""What a rank holds of a cache that several share, and a :class:`Work` as it sees it.

Page p of the pool is page p // ranks of rank p mod ranks (:mod:`colonnade.serve.page_pool`). Of a request's table a
rank has the pages that are its own, in their order; of the tokens it runs all, and keeps the keys and values of those
in its pages. The rest goes into the last page of its cache, which is nobody's. One rank holds everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from colonnade.kernels.attention.chunk import TokenRows
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.device import upload
from colonnade.model import KVCache, Transformer
from colonnade.model.sharded_kv_cache import Past, ShardedPaged
from colonnade.parallel.axis import Axis
from colonnade.serve.scheduler import Slice


@dataclass(frozen=True)
class CacheShard:
    """This rank's part of the pages of a pool."""

    axis: Axis
    cache: KVCache
    windows: frozenset[int | None]
    """Of the model's layers."""

    @staticmethod
    def of(model: Transformer, cache: KVCache) -> "CacheShard":
        """The part of this rank of ``model``."""
        windows = frozenset(model.config.window_of(i) for i in range(model.config.layers))
        return CacheShard(model.axes.cp, cache, windows)

    @property
    def whole(self) -> bool:
        """Whether it is everything."""
        return self.axis.size == 1

    @property
    def scratch(self) -> int:
        """The page that is nobody's, where there is one."""
        return self.cache.pages - 1

    def pages(self, piece: Slice) -> Sequence[int]:
        """The numbers, in this rank's cache, of those pages of a request that are here, in their order."""
        if self.whole:
            return piece.pages
        ranks, rank = self.axis.size, self.axis.rank
        return [page // ranks for page in piece.pages if page % ranks == rank]

    def keys(self, piece: Slice) -> int:
        """How many of a request's positions are here, its new tokens among them."""
        end, size = piece.start + len(piece.tokens), self.cache.page_tokens
        if self.whole:
            return end
        ranks, rank = self.axis.size, self.axis.rank
        missing = len(piece.pages) * size - end if piece.pages[-1] % ranks == rank else 0
        return sum(page % ranks == rank for page in piece.pages) * size - missing

    def slots(self, piece: Slice) -> list[int]:
        """Where in this rank's cache each new token's key and value go."""
        size = self.cache.page_tokens
        if self.whole:
            return piece.slots(size)
        ranks, rank = self.axis.size, self.axis.rank
        ours = ((slot // size, slot % size) for slot in piece.slots(size))
        return [(p // ranks if p % ranks == rank else self.scratch) * size + (p % ranks == rank) * at for p, at in ours]

    def split(
        self, slices: Sequence[Slice], table: PageTable, slots_T: Tensor, positions_T: Tensor, kernels: str = "auto"
    ) -> ShardedPaged:
        """What a model is called with, where the cache is shared; ``table`` is of what is here."""
        device = positions_T.device
        counts = [len(piece.tokens) for piece in slices]
        counts += [1] * (len(positions_T) - sum(counts))  # what pads a step of fixed shape
        ordered = upload([r for r, n in enumerate(counts) for _ in range(n)], torch.int64, device)
        new = TokenRows(positions_T, ordered, table.cu_queries, max(counts), 0)
        chunks = max(counts) > 1
        past = {
            window: self._past(slices, len(counts), window, device)
            for window in self.windows
            if chunks or window is not None
        }
        return ShardedPaged(self.axis, self.cache, table, slots_T, new, past, kernels)

    def _past(self, slices: Sequence[Slice], requests: int, window: int | None, device: torch.device) -> Past:
        """The keys before each slice that are here and that one of its tokens sees."""
        size, ranks, rank = self.cache.page_tokens, self.axis.size, self.axis.rank
        slots, positions, counts = [], [], []
        offset_p = torch.arange(size)
        for piece in slices:
            first = 0 if window is None else max(0, piece.start - window + 1)
            places = range(first // size, -(-piece.start // size))
            here = [(place, piece.pages[place] // ranks) for place in places if piece.pages[place] % ranks == rank]
            place_P, page_P = torch.tensor(here, dtype=torch.int64).view(-1, 2).T
            position_S = (place_P[:, None] * size + offset_p).flatten()
            older = position_S < piece.start
            slots.append((page_P[:, None] * size + offset_p).flatten()[older])
            positions.append(position_S[older])
            counts.append(len(positions[-1]))
        counts += [0] * (requests - len(counts))
        gpu = device.type == "cuda"

        def put(x: Tensor) -> Tensor:
            return x.pin_memory().to(device, non_blocking=True) if gpu else x

        segment_S = torch.arange(requests).repeat_interleave(torch.tensor(counts))
        cu = upload([0, *accumulate(counts)], torch.int32, device)
        rows = TokenRows(put(torch.cat(positions)), put(segment_S), cu, max(counts), 0)
        return Past(put(torch.cat(slots)), rows)
