"""Segment attention (Emformer, Shi et al., arXiv 2010.10759): bounded context and latency for streams.

A sequence is cut into segments of S frames. Segment i's queries are its frames C_i, copies R_i of the R frames after
it, and a summary s_i, the mean of its normed frames:

    C_i, R_i attend to   m_{i−M} … m_{i−1},  L frames before C_i,  C_i,  R_i
    s_i attends to                           L frames before C_i,  C_i,  R_i

m_i, one vector a segment, is the memory: the mean of C_i in the first layer, then tanh of what s_i attended to in the
layer before. With M = 0 there are neither summaries nor memories. There are no positions, so the order of keys is free.

The rows of a batch are flat: all frames, all copies, all summaries, all memories. :class:`SegmentBatch` attends in
whole sequences: the keys of each segment are gathered, which is linear in T, and all segments are one batch.
:mod:`colonnade.model.segment_cache` attends one segment at a time; the numbers are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.errors import ConfigError, DataError


@dataclass(frozen=True)
class Segments:
    """Sizes in frames: S of a segment, L before it, R after it; M memories (of a segment each)."""

    segment: int
    left: int
    right: int
    memory: int = 0

    def __post_init__(self):
        if self.segment < 1 or min(self.left, self.right, self.memory) < 0:
            raise ConfigError(
                f"segment is {self.segment}, left {self.left}, right {self.right}, memory {self.memory}; "
                "use a segment of at least 1 frame and no negative numbers"
            )

    def batch(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> "SegmentBatch":
        """The attend of whole sequences of these lengths, one after another."""
        if any(n < 0 for n in lengths):
            raise DataError(f"lengths {list(lengths)}; use numbers of frames, 0 or more")
        return SegmentBatch.of(self, lengths, torch.device(device))


@dataclass(frozen=True)
class SegmentRows:
    """How the flat rows of a batch are divided: frames, copies, summaries, memories."""

    segment_T: Tensor
    """The segment of each frame, among all of the batch."""
    copy_of: Tensor
    """The frame that each copy repeats."""
    segments: int
    memory: bool

    @property
    def frames(self) -> int:
        """T, without copies."""
        return len(self.segment_T)

    def mean(self, x_TD: Tensor) -> Tensor:
        """The mean of each segment's frames, (segments, D)."""
        counts = torch.bincount(self.segment_T, minlength=self.segments).clamp(min=1)
        total = x_TD.new_zeros(self.segments, x_TD.shape[1]).index_add(0, self.segment_T, x_TD)
        return total / counts[:, None].to(x_TD.dtype)


def attend_segments(q_BSnH: Tensor, k_BSkH: Tensor, v_BSkH: Tensor, mask_BSS: Tensor) -> Tensor:
    """softmax(q kᵀ/√H) v of B segments; ``mask`` (B, queries or 1, keys) marks the keys that count."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSnH, k_BSkH, v_BSkH))
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BSS[:, None], enable_gqa=grouped)
    return o.transpose(1, 2)


@dataclass(frozen=True)
class SegmentBatch:
    """Whole sequences; an index of −1 is padding."""

    caches: ClassVar[bool] = False

    rows: SegmentRows
    queries_BS: Tensor
    """The row of each query of a segment: S frames, R copies, with memory a summary."""
    keys_BS: Tensor
    """The row of each key of a segment: M memories, L frames, S frames, R copies."""
    memories: int

    @staticmethod
    def of(sizes: Segments, lengths: Sequence[int], device: torch.device) -> "SegmentBatch":
        """Index tables for sequences of these lengths."""
        S, L, R, M = sizes.segment, sizes.left, sizes.right, sizes.memory
        starts, ends, firsts, begins = [], [], [], []
        base = 0
        for n in lengths:
            first = len(starts)
            for start in range(0, n, S):
                starts.append(base + start)
                ends.append(base + n)
                firsts.append(first)
                begins.append(base)
            base += n
        B = len(starts)
        start_B1, end_B1, first_B1, begin_B1 = (
            torch.tensor(x, dtype=torch.long)[:, None] for x in (starts, ends, firsts, begins)
        )
        number_B1 = torch.arange(B)[:, None]
        own = start_B1 + torch.arange(S)
        own = torch.where(own < end_B1, own, -1)
        after = start_B1 + S + torch.arange(R)
        has_copy = after < end_B1
        copies = torch.full((B, R), -1)
        copies[has_copy] = base + torch.arange(int(has_copy.sum()))
        before = start_B1 - L + torch.arange(L)
        before = torch.where(before >= begin_B1, before, -1)
        summary_0 = base + int(has_copy.sum())
        memories = number_B1 - M + torch.arange(M)
        memories = torch.where(memories >= first_B1, summary_0 + B + memories, -1)
        queries = [own, copies] + ([summary_0 + number_B1] if M else [])
        rows = SegmentRows(
            number_B1.expand(B, S)[own >= 0].to(device), after[has_copy].to(device), segments=B, memory=M > 0
        )
        keys = torch.cat((memories, before, own, copies), 1)
        return SegmentBatch(rows, torch.cat(queries, 1).to(device), keys.to(device), M)

    def at(self, layer: int, window: int | None) -> "SegmentBatch":
        """The view of one layer: all are the same."""
        return self

    @cached_property
    def _mask(self) -> Tensor:
        """Which keys each query sees: all of its segment; a summary no memories."""
        mask = (self.keys_BS >= 0)[:, None].repeat(1, self.queries_BS.shape[1], 1)
        if self.memories:
            mask[:, -1, : self.memories] = False
        return mask

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH; 0 for memories, which do not ask."""
        keys, queries, asked, rows = self._index
        B = len(self.queries_BS)
        q_BSnH = q_TnH.index_select(0, queries).unflatten(0, (B, -1))  # its gradient is faster than that of q[queries]
        k_BSkH, v_BSkH = (x.index_select(0, keys).unflatten(0, (B, -1)) for x in (k_TkH, v_TkH))
        o_AnH = attend_segments(q_BSnH, k_BSkH, v_BSkH, self._mask).flatten(0, 1).index_select(0, asked)
        return torch.zeros_like(q_TnH).index_copy(0, rows, o_AnH)

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Flat rows of keys and queries, the places of queries that are no padding, and their rows."""
        queries = self.queries_BS.flatten()
        asked = (queries >= 0).nonzero().squeeze(1)
        return self.keys_BS.flatten().clamp(min=0), queries.clamp(min=0), asked, queries[asked]
