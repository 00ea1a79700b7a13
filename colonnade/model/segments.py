"""Segment attention (Emformer, Shi et al., arXiv 2010.10759): bounded context and latency for streams.

A sequence is cut into segments of S frames. Segment i's queries are its frames C_i, copies R_i of the R frames after
it, and a summary s_i, the mean of its normed frames:

    C_i, R_i attend to   m_{i−M} … m_{i−1},  L frames before C_i,  C_i,  R_i
    s_i attends to                           L frames before C_i,  C_i,  R_i

m_i, one vector a segment, is the memory: the mean of C_i in the first layer, then tanh of what s_i attended to in the
layer before. With M = 0 there are neither summaries nor memories. There are no positions, so the order of keys is free.

The cache-aware Conformer (:mod:`colonnade.model.conformer`) has R = M = 0, and two more things that depend on where its
frames are: relative positions (:class:`RelativeKeys`) and causal convolutions, for which ``history`` puts the frames
before each sequence's own in front of them.

The rows of a batch are flat: all frames, all copies, all summaries, all memories. :class:`SegmentBatch` attends in
whole sequences: the keys of each segment are gathered, which is linear in T, and all segments are one batch.
:mod:`colonnade.model.segment_cache` attends one segment at a time; the numbers are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

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


class RelativeKeys(NamedTuple):
    """Adds p·r to the scores: r of the distance from key to query (Transformer-XL, arXiv 1901.02860, section 3.3)."""

    p_TnH: Tensor
    """The queries' share that meets positions."""
    r_PnH: Tensor
    """A key for each distance of ``attend.distances``."""


class History(NamedTuple):
    """Rows of several sequences in one run, each after the rows before its own."""

    x_ED: Tensor
    """K − 1 rows before the first row of a sequence (0 where it begins), then its rows, for each sequence."""
    place_T: Tensor
    """Where in ``x_ED`` the K rows that end with each row begin."""


def attend_segments(
    q_BSnH: Tensor, k_BSkH: Tensor, v_BSkH: Tensor, mask_BSS: Tensor, bias_BnSS: Tensor | None = None
) -> Tensor:
    """softmax(q kᵀ/√H + bias) v of B segments; ``mask`` (B, queries or 1, keys) marks the valid keys."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSnH, k_BSkH, v_BSkH))
    grouped = q.shape[1] != k.shape[1]
    mask = mask_BSS[:, None]
    if bias_BnSS is not None:
        mask = bias_BnSS.masked_fill(~mask, -torch.inf)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return o.transpose(1, 2)


def distance_bias(p_BSnH: Tensor, r_PnH: Tensor, distance_BSS: Tensor, first: int) -> Tensor:
    """p·r/√H of each query and key, (B, n, queries, keys); ``r_PnH`` begins with the distance ``first``."""
    scores_BnSP = torch.einsum("bqnh,pnh->bnqp", p_BSnH, r_PnH) * p_BSnH.shape[3] ** -0.5
    index = (distance_BSS - first).clamp(0, len(r_PnH) - 1)[:, None].expand(*scores_BnSP.shape[:3], -1)
    return scores_BnSP.gather(3, index)


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
    sizes: Segments
    lengths: tuple[int, ...]

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
        return SegmentBatch(rows, torch.cat(queries, 1).to(device), keys.to(device), M, sizes, tuple(lengths))

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

    @property
    def distances(self) -> range:
        """All distances from a key to a query, in frames."""
        return range(1 - self.sizes.segment, self.sizes.left + self.sizes.segment)

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor, relative: RelativeKeys | None = None) -> Tensor:
        """o_TnH; 0 for memories, which have no queries. ``relative`` needs R = M = 0."""
        keys, queries, asked, rows = self._index
        by_query, by_key = self.queries_BS.shape, self.keys_BS.shape
        q_BSnH = q_TnH.index_select(0, queries).unflatten(0, by_query)  # its gradient is faster than that of q[queries]
        k_BSkH, v_BSkH = (x.index_select(0, keys).unflatten(0, by_key) for x in (k_TkH, v_TkH))
        bias = None
        if relative is not None:
            p_BSnH = relative.p_TnH.index_select(0, queries).unflatten(0, by_query)
            bias = distance_bias(p_BSnH, relative.r_PnH, self._distance, self.distances.start)
        o_BSnH = attend_segments(q_BSnH, k_BSkH, v_BSkH, self._mask, bias)
        return torch.zeros_like(q_TnH).index_copy(0, rows, o_BSnH.flatten(0, 1).index_select(0, asked))

    def history(self, x_TD: Tensor, kernel: int) -> History:
        """Each whole sequence after ``kernel`` − 1 rows of 0."""
        place_T = self._sequence * (kernel - 1) + torch.arange(len(x_TD), device=x_TD.device)
        rows = len(x_TD) + len(self.lengths) * (kernel - 1)
        return History(x_TD.new_zeros(rows, x_TD.shape[1]).index_copy(0, place_T + kernel - 1, x_TD), place_T)

    @cached_property
    def _sequence(self) -> Tensor:
        """The number of each frame's sequence."""
        lengths = torch.tensor(self.lengths, dtype=torch.long, device=self.keys_BS.device)
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    @cached_property
    def _distance(self) -> Tensor:
        """The distance from each key of a segment to each query: L frames, then the segment."""
        device, S, L = self.keys_BS.device, self.sizes.segment, self.sizes.left
        return (torch.arange(S, device=device)[:, None] + L - torch.arange(L + S, device=device))[None]

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Flat rows of keys and queries, the slots of queries that are not padding, and their rows."""
        queries = self.queries_BS.flatten()
        asked = (queries >= 0).nonzero().squeeze(1)
        return self.keys_BS.flatten().clamp(min=0), queries.clamp(min=0), asked, queries[asked]
