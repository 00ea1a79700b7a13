"""Which ids of a managed table have their own rows: look-up by binary search, and selection from the history.

All work runs on one device, in the order of its current stream. A hash is a 64-bit number whose sign bit is inverted,
so that int64's order is that of the unsigned hash; its top 6 bits are its bucket.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Policy = Literal["lfu", "lru", "decay"]
BUCKET_BITS = 6
BUCKETS = 1 << BUCKET_BITS
SIGN = -(1 << 63)


def bucket_of(hashes: Tensor) -> Tensor:
    """0 to 63."""
    return (hashes >> (64 - BUCKET_BITS)) + BUCKETS // 2


def unsigned_hashes(hashes: Tensor) -> np.ndarray:
    """The hashes as uint64."""
    return (hashes.cpu() ^ SIGN).numpy().view(np.uint64)


class OwnRowIds(NamedTuple):
    """The ids with their own rows, by ascending hash."""

    hashes: Tensor
    slots: Tensor
    counts: Tensor
    last: Tensor
    """The last step in which each was seen."""


class ManagedIds:
    """The kept ids of the buckets ``first_bucket`` to ``stop_bucket``; the last row of each bucket is shared."""

    def __init__(
        self,
        first_bucket: int,
        stop_bucket: int,
        per_bucket: int,
        *,
        policy: Policy,
        decay: float,
        device: torch.device,
    ):
        self.first_bucket, self.stop_bucket, self.per_bucket = first_bucket, stop_bucket, per_bucket
        self.policy, self.decay = policy, decay
        none = torch.empty(0, dtype=torch.int64, device=device)
        self.kept = OwnRowIds(none, none, none, none)

    def rows(self, hashes_M: Tensor) -> tuple[Tensor, Tensor]:
        """(row within these buckets, whether it is the id's own)."""
        kept, shared_M = self.kept, (bucket_of(hashes_M) - self.first_bucket + 1) * self.per_bucket - 1
        if not len(kept.hashes):
            return shared_M, torch.zeros_like(shared_M, dtype=torch.bool)
        at_M = torch.searchsorted(kept.hashes, hashes_M).clamp_(max=len(kept.hashes) - 1)
        hit_M = kept.hashes[at_M] == hashes_M
        return torch.where(hit_M, kept.slots[at_M], shared_M), hit_M

    def assign(self, history: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Merge the hashes seen since into the kept ids and keep the best of each bucket; (new hashes, their rows)."""
        kept = self.kept
        seen, seen_counts = torch.unique(history, return_counts=True)
        hashes, inverse = torch.unique(torch.cat([kept.hashes, seen]), return_inverse=True)
        old, new = inverse[: len(kept.hashes)], inverse[len(kept.hashes) :]
        counts, last, slots = torch.zeros_like(hashes), torch.zeros_like(hashes), torch.full_like(hashes, -1)
        counts[old], last[old], slots[old] = kept.counts, kept.last, kept.slots
        counts[new] += seen_counts
        last[new] = step
        bucket = bucket_of(hashes) - self.first_bucket
        # Among equals those with a row stay, then the lowest hash: hashes ascend, and all sorts are stable.
        order = torch.sort(slots < 0, stable=True).indices
        order = order[torch.sort(self._scores(counts, last, step)[order], descending=True, stable=True).indices]
        order = order[torch.sort(bucket[order], stable=True).indices]
        # Hashes ascend by bucket, so the ordered buckets are `bucket` itself.
        starts = torch.searchsorted(bucket, torch.arange(self.stop_bucket - self.first_bucket, device=bucket.device))
        place = torch.arange(len(order), device=order.device) - starts[bucket]
        stays = torch.sort(order[place < self.per_bucket - 1]).values
        hashes, counts, last, slots, bucket = (x[stays] for x in (hashes, counts, last, slots, bucket))
        fresh = torch.nonzero(slots < 0).squeeze(1)
        slots[fresh] = self._free(slots[slots >= 0], bucket[fresh])
        self.kept = OwnRowIds(hashes, slots, counts, last)
        return hashes[fresh], slots[fresh]

    def _scores(self, counts: Tensor, last: Tensor, step: int) -> Tensor:
        if self.policy == "lfu":
            return counts
        if self.policy == "lru":
            return last
        return counts / (step - last + 1).double() ** self.decay

    def _free(self, used: Tensor, bucket_of_new: Tensor) -> Tensor:
        """Free slots for new ids, which are in the order of their buckets: the lowest of each."""
        buckets = self.stop_bucket - self.first_bucket
        is_free = torch.ones(buckets, self.per_bucket, dtype=torch.bool, device=used.device)
        is_free[:, -1] = False  # shared
        is_free.view(-1)[used] = False
        wanted = torch.bincount(bucket_of_new, minlength=buckets)
        taken = is_free & (is_free.cumsum(1) <= wanted[:, None])
        return torch.nonzero(taken.view(-1)).squeeze(1)
