"""Keys and values of streams in fixed slots, and the attend that runs one segment of each.

Each layer has, for each stream, M + 1 slots of memories, a ring of L + S slots of frames and R slots for copies. Frame
t is written to slot t mod (L + S), over a frame that no later segment sees; segment i's memory to slot i mod (M + 1),
the one that segment i does not read. So a step moves no old key: it writes the new ones and attends to the slots of
its stream under a mask. (Without positions the order of keys is free.) The memory is constant, whatever a stream's
length. Streams may have different S, L and R: each has slots for the largest, and a step reads as many slots as the
largest of its streams uses. Frames before a segment that a causal convolution reads are in separate slots, also
written over no frame that the segment reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from colonnade.errors import CapacityError, DataError
from colonnade.model.segments import History, RelativeKeys, SegmentRows, Segments, attend_segments, distance_bias


class SegmentCache:
    """Slots for at most ``streams`` streams; ``sizes`` has the largest S, L and R of a stream."""

    def __init__(
        self,
        sizes: Segments,
        streams: int,
        layers: int,
        kv_heads: int,
        head_width: int,
        *,
        history: int = 0,
        width: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """``kv_heads``: this rank's. ``history``: frames of ``width`` before a segment that a convolution reads."""
        self.sizes, self.streams = sizes, streams
        self.memory_slots = sizes.memory + 1 if sizes.memory else 0
        self.width = self.slots_of(sizes)
        shape = (layers, streams, self.width, kv_heads, head_width)
        self.k_LBSkH = torch.zeros(shape, device=device, dtype=dtype)
        self.v_LBSkH = torch.zeros(shape, device=device, dtype=dtype)
        self.x_LBSD = torch.zeros(
            layers, streams, history + sizes.segment if history else 0, width, device=device, dtype=dtype
        )
        self.history = history
        self.free = list(range(streams - 1, -1, -1))
        self.frames = [0] * streams
        self.segments = [0] * streams
        self.sizes_of = [sizes] * streams

    @property
    def cache_bytes(self) -> int:
        """Memory of keys, values and frames before convolutions."""
        return (2 * self.k_LBSkH.numel() + self.x_LBSD.numel()) * self.k_LBSkH.element_size()

    def slots_of(self, sizes: Segments) -> int:
        """Number of slots that a stream of these sizes uses."""
        return self.memory_slots + sizes.left + sizes.segment + sizes.right

    def open(self, sizes: Segments | None = None) -> int:
        """A stream's number, with its own S, L and R if given; raises CapacityError if all streams are taken."""
        sizes, most = sizes or self.sizes, self.sizes
        if sizes.segment > most.segment or sizes.right > most.right or sizes.left > most.left:
            raise DataError(
                f"a segment of {sizes.segment} frames, {sizes.left} before and {sizes.right} after it; at most "
                f"{most.segment}, {most.left} and {most.right} fit into this cache"
            )
        if sizes.memory != most.memory:
            raise DataError(f"memory {sizes.memory}; all streams of this cache have {most.memory}")
        if not self.free:
            raise CapacityError(f"all {self.streams} streams are in use; close one, or make the pool larger")
        stream = self.free.pop()
        self.frames[stream] = self.segments[stream] = 0
        self.sizes_of[stream] = sizes
        return stream

    def close(self, stream: int) -> None:
        """Return the stream's slots."""
        if stream in self.free or not 0 <= stream < self.streams:
            raise DataError(f"stream {stream} is not open")
        self.free.append(stream)

    def step(self, parts: Sequence[tuple[int, int, int]]) -> "SegmentStep":
        """The attend of one segment for each (stream, frames, copies of frames after it).

        Rows are all frames, then all copies, in this order. Call :meth:`commit` after the pass: a pass that failed may
        be repeated.
        """
        for stream, n, r in parts:
            if stream in self.free:
                raise DataError(f"stream {stream} is not open")
            sizes = self.sizes_of[stream]
            if not 1 <= n <= sizes.segment or not 0 <= r <= sizes.right:
                raise DataError(
                    f"stream {stream} has a segment of {n} frames and {r} after it; at most {sizes.segment} and "
                    f"{sizes.right} fit, and at least 1 frame"
                )
            if self.frames[stream] % sizes.segment:
                raise DataError(f"stream {stream} had a short segment, which must be its last")
        if len({stream for stream, _, _ in parts}) != len(parts):
            raise DataError("a stream may run only one segment per step")
        return SegmentStep.of(self, parts)

    def commit(self, step: "SegmentStep") -> None:
        """Advance the streams of ``step``."""
        for stream, n, _ in step.parts:
            self.frames[stream] += n
            self.segments[stream] += 1


@dataclass(frozen=True)
class SegmentStep:
    """One segment of B streams."""

    caches: ClassVar[bool] = True

    cache: SegmentCache
    parts: Sequence[tuple[int, int, int]]
    rows: SegmentRows
    queries_BS: Tensor
    """The row of each query, −1 for padding."""
    written: Tensor
    """The rows whose keys are stored: frames, copies, memories; no summaries."""
    slots: Tensor
    """Where, among all streams' slots."""
    streams_B: Tensor
    mask_BSS: Tensor
    """Which of its stream's slots each query sees."""
    frames_BS: Tensor
    """The number of the frame in each slot, where the mask is true."""
    starts_B: Tensor
    """The number of each segment's first frame."""

    @staticmethod
    def of(cache: SegmentCache, parts: Sequence[tuple[int, int, int]]) -> "SegmentStep":
        """Tables of one step; their sizes are bounded by the streams, not by their lengths."""
        device, M, memory_slots = cache.k_LBSkH.device, cache.sizes.memory, cache.memory_slots
        sizes_B = [cache.sizes_of[stream] for stream, _, _ in parts]
        S, R = max(sizes.segment for sizes in sizes_B), max(sizes.right for sizes in sizes_B)
        B, T, copies = len(parts), sum(n for _, n, _ in parts), sum(r for _, _, r in parts)
        states = [
            (stream, n, r, cache.frames[stream], cache.segments[stream], sizes.left, sizes.left + sizes.segment)
            for (stream, n, r), sizes in zip(parts, sizes_B, strict=True)
        ]
        stream_B1, n_B1, r_B1, start_B1, number_B1, left_B1, ring_B1 = torch.tensor(states).T.unsqueeze(2)
        frame_S, copy_R = torch.arange(S), torch.arange(R)
        is_frame_BS, is_copy_BR = frame_S < n_B1, copy_R < r_B1
        queries = torch.full((B, S + R + (M > 0)), -1)
        queries[:, :S][is_frame_BS] = torch.arange(T)
        queries[:, S : S + R][is_copy_BR] = torch.arange(T, T + copies)
        if M:
            queries[:, -1] = torch.arange(T + copies, T + copies + B)
        # Slots of a stream: memories, the ring of frames, copies. The ring's slot j has the last frame t = j mod ring.
        place_P = torch.arange(max(map(cache.slots_of, sizes_B))) - memory_slots
        last_B1 = start_B1 + n_B1 - 1
        numbers = last_B1 - (last_B1 - place_P) % ring_B1
        in_ring = (place_P >= 0) & (place_P < ring_B1)
        mask = in_ring & (numbers >= (start_B1 - left_B1).clamp(min=0))
        numbers = numbers.where(mask, 0)
        mask |= (place_P >= ring_B1) & (place_P < ring_B1 + r_B1)
        base_B1 = stream_B1 * cache.width
        first_B1 = base_B1 + memory_slots
        slots = [
            (first_B1 + (start_B1 + frame_S) % ring_B1)[is_frame_BS], (first_B1 + ring_B1 + copy_R)[is_copy_BR],
        ]  # fmt: skip
        if M:
            memories = number_B1 - 1 - (number_B1 - 1 - torch.arange(memory_slots)) % memory_slots
            mask[:, :memory_slots] = memories >= (number_B1 - M).clamp(min=0)
            slots.append((base_B1 + number_B1 % memory_slots)[:, 0])
        rows = SegmentRows(
            torch.repeat_interleave(torch.arange(B), n_B1[:, 0]).to(device), torch.empty(0, dtype=torch.long), B, M > 0
        )
        mask_BSS = mask[:, None].repeat(1, queries.shape[1], 1)
        written = torch.arange(T + copies)
        if M:
            mask_BSS[:, -1, :memory_slots] = False
            written = torch.cat((written, T + copies + B + torch.arange(B)))
        tables = (
            x.to(device)
            for x in (queries, written, torch.cat(slots), stream_B1[:, 0], mask_BSS, numbers, start_B1[:, 0])
        )
        return SegmentStep(cache, parts, rows, *tables)

    def at(self, layer: int, window: int | None) -> "SegmentStepView":
        """The view of one layer."""
        cache = self.cache
        return SegmentStepView(self, cache.k_LBSkH[layer], cache.v_LBSkH[layer], cache.x_LBSD[layer])

    @property
    def distances(self) -> range:
        """All distances from a key to a query, in frames."""
        sizes_B = [self.cache.sizes_of[stream] for stream, _, _ in self.parts]
        S = max(sizes.segment for sizes in sizes_B)
        return range(1 - S, S + max(sizes.left for sizes in sizes_B))

    @cached_property
    def in_order(self) -> bool:
        """Whether the rows are the queries of one stream, without padding and memories: no row moves then."""
        return len(self.parts) == 1 and not self.rows.memory and bool((self.queries_BS >= 0).all())

    @cached_property
    def query_rows(self) -> Tensor:
        """The row of each query, flat; of padding the first."""
        return self.queries_BS.flatten().clamp(min=0)

    @cached_property
    def query_slots(self) -> tuple[Tensor, Tensor]:
        """(the slots of queries that are not padding, their rows)."""
        queries = self.queries_BS.flatten()
        places = (queries >= 0).nonzero().squeeze(1)
        return places, queries[places]

    @cached_property
    def stream_index(self) -> slice | Tensor:
        """The streams; a slice if they follow each other, which copies no keys."""
        streams = [stream for stream, _, _ in self.parts]
        own = slice(streams[0], streams[0] + len(streams))
        return own if streams == [*range(own.start, own.stop)] else self.streams_B

    @cached_property
    def key_distances(self) -> Tensor:
        """The distance from the key in each slot to each query."""
        queries = torch.arange(self.queries_BS.shape[1], device=self.starts_B.device)
        return self.starts_B[:, None, None] + queries[:, None] - self.frames_BS[:, None]

    @cached_property
    def frame_slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """(the stream of each frame, its number, its row among all frames with the ``history`` before each segment)."""
        rows: list[tuple[int, int, int]] = []
        for b, (stream, n, _) in enumerate(self.parts):
            start, first = self.cache.frames[stream], len(rows) + (b + 1) * self.cache.history
            rows += [(stream, start + i, first + i) for i in range(n)]
        streams, numbers, places = torch.tensor(rows, device=self.starts_B.device).T
        return streams, numbers, places


@dataclass(frozen=True)
class SegmentStepView:
    """One layer of a :class:`SegmentStep`: writes the new keys and values, then attends."""

    caches: ClassVar[bool] = True

    step: SegmentStep
    k_BSkH: Tensor
    v_BSkH: Tensor
    x_BSD: Tensor

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor, relative: RelativeKeys | None = None) -> Tensor:
        """o_TnH; 0 for memories. ``relative`` needs R = M = 0."""
        step = self.step
        for pool, new in ((self.k_BSkH, k_TkH), (self.v_BSkH, v_TkH)):
            stored = new[step.written] if step.rows.memory else new
            pool.flatten(0, 1).index_copy_(0, step.slots, stored.to(pool.dtype))
        slots = step.mask_BSS.shape[2]
        keys, values = self.k_BSkH[:, :slots][step.stream_index], self.v_BSkH[:, :slots][step.stream_index]
        bias = None
        if relative is not None:
            p_BSnH, r_PnH = self._by_query(relative.p_TnH), relative.r_PnH
            bias = distance_bias(p_BSnH, r_PnH, step.key_distances, step.distances.start)
        o_BSnH = attend_segments(self._by_query(q_TnH), keys, values, step.mask_BSS, bias)
        if step.in_order:
            return o_BSnH[0]
        places, rows = step.query_slots
        return torch.zeros_like(q_TnH).index_copy(0, rows, o_BSnH.flatten(0, 1).index_select(0, places))

    def _by_query(self, x_TnH: Tensor) -> Tensor:
        """The rows of each stream's queries."""
        if self.step.in_order:
            return x_TnH[None]
        return x_TnH.index_select(0, self.step.query_rows).unflatten(0, self.step.queries_BS.shape)

    def history(self, x_TD: Tensor, kernel: int) -> History:
        """The rows of each stream after the ``kernel`` − 1 before them; stores the new ones."""
        step, ring, K = self.step, self.x_BSD.shape[1], kernel - 1
        assert self.step.cache.history == K, "a cache for another kernel"
        streams_T, numbers_T, places_T = step.frame_slots
        x_ED = x_TD.new_zeros(len(x_TD) + len(step.parts) * K, x_TD.shape[1]).index_copy(0, places_T, x_TD)
        if K:
            before_BK = step.starts_B[:, None] - K + torch.arange(K, device=x_TD.device)
            old_BKD = self.x_BSD[step.streams_B[:, None], before_BK % ring].masked_fill((before_BK < 0)[..., None], 0.0)
            first_B = torch.tensor([n for _, n, _ in step.parts], device=x_TD.device).cumsum(0)
            first_B = first_B.roll(1).index_fill(0, first_B.new_zeros(1), 0) + K * torch.arange(
                len(first_B), device=x_TD.device
            )
            x_ED[(first_B[:, None] + torch.arange(K, device=x_TD.device))] = old_BKD.to(x_ED)
            self.x_BSD[streams_T, numbers_T % ring] = x_TD.to(self.x_BSD.dtype)
        return History(x_ED, places_T - K)
