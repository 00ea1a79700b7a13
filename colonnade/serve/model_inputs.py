"""Turns a :class:`Work` into tensors: the broadcast to other ranks, this rank's part of the cache, the model's inputs.

Rank 0 broadcasts each work as int64 tensors, without pickling: a corrupt message is at worst a wrong schedule.

    header  [kind, length of the payload, bytes of the masks]
    payload [slices, then start, batch row, tokens, pages, samples, targets, alternatives, adapter of each, and of its
             source tokens to encode, pages, length; then all tokens, page tables, targets, sources, sample args]
    masks   the grammar masks of the sample args that have one, as bytes

Under context parallelism page p is page p // ranks of rank p mod ranks (:mod:`colonnade.serve.page_pool`). Each rank
runs all tokens, reads its own pages of each page table, in order, and stores the keys and values of the tokens in these
pages. Those of the other tokens go to the scratch page, the last one of its cache. One rank alone has all pages.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import torch
from torch import Tensor

from colonnade.kernels.attention.chunk import TokenRows
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.device import upload
from colonnade.model import EncoderDecoderAttend, KVCache, Packed, Paged, PagedMemory, Source, Stream, Transformer
from colonnade.model.context_parallel import CachedKeys, ShardedPaged
from colonnade.parallel.axis import Axis
from colonnade.serve.sample_args import SampleArgs
from colonnade.serve.sampler import NextTokens, PromptTargets
from colonnade.serve.work import Slice, Work

RUN, IDLE, STOP, SWAP = 1, 2, 3, 4
"""Kinds of message: run this work; heartbeat of an idle engine; leave the loop; the next stage of a weight swap."""


def broadcast_message(axis: Axis, kind: int, payload: Sequence[int] = (), data: bytes = b"") -> None:
    """Send a message from rank 0 of ``axis`` to all others, which call :func:`receive_message`."""
    if axis.size > 1:
        axis.broadcast_(torch.tensor([kind, len(payload), len(data)], dtype=torch.int64))
        if payload:
            axis.broadcast_(torch.tensor(payload, dtype=torch.int64))
        if data:
            axis.broadcast_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def receive_message(axis: Axis) -> tuple[int, list[int], bytes]:
    """The next message of rank 0: its kind, payload and data."""
    kind, length, data_bytes = axis.broadcast_(torch.zeros(3, dtype=torch.int64)).tolist()
    payload = axis.broadcast_(torch.zeros(length, dtype=torch.int64)).tolist() if length else []
    data = axis.broadcast_(torch.zeros(data_bytes, dtype=torch.uint8)).numpy().tobytes() if data_bytes else b""
    return kind, payload, data


def broadcast_work(axis: Axis, work: Work) -> None:
    """Send ``work`` as a message of the kind :data:`RUN`."""
    if axis.size > 1:
        broadcast_message(axis, RUN, *pack_work(work))


def receive_work(axis: Axis) -> tuple[int, Work | None]:
    """The next message of rank 0: its kind and, for RUN, its work."""
    kind, payload, masks = receive_message(axis)
    return kind, unpack_work(payload, masks) if kind == RUN else None


def pack_work(work: Work) -> tuple[list[int], bytes]:
    """The payload of ``work``, without its requests, and its masks."""
    heads = [
        (s.start, s.batch_row, len(s.tokens), len(s.pages), s.sample_args is not None, len(s.targets), s.alternatives,
         s.adapter, len(s.source), len(s.source_pages), s.source_length)
        for s in work.slices
    ]  # fmt: skip
    tokens = chain.from_iterable(s.tokens for s in work.slices)
    pages = chain.from_iterable(s.pages for s in work.slices)
    targets = chain.from_iterable(s.targets for s in work.slices)
    sources = chain.from_iterable((*s.source, *s.source_pages) for s in work.slices)
    args = chain.from_iterable(each.pack() for each in work.sample_args)
    masks = [each.changes.mask for each in work.sample_args if each.changes and each.changes.mask]
    return [
        len(work.slices),
        *map(int, chain.from_iterable(heads)),
        *tokens,
        *pages,
        *targets,
        *sources,
        *args,
    ], b"".join(masks)


def unpack_work(payload: Sequence[int], masks: bytes = b"") -> Work:
    """The inverse of :func:`pack_work`."""
    rest = iter(payload)
    heads = [tuple(islice(rest, 11)) for _ in range(next(rest))]
    tokens = [tuple(islice(rest, head[2])) for head in heads]
    pages = [tuple(islice(rest, head[3])) for head in heads]
    targets = [tuple(islice(rest, head[5])) for head in heads]
    sources = [(tuple(islice(rest, head[8])), tuple(islice(rest, head[9]))) for head in heads]
    mask_bytes = io.BytesIO(masks)
    args = [SampleArgs.unpack(rest, mask_bytes) if head[4] else None for head in heads]
    pieces = zip(heads, tokens, pages, args, targets, sources, strict=True)
    return Work(
        tuple(
            Slice(h[0], t, p, a, h[1], wanted, h[6], h[7], far[0], far[1], h[10]) for h, t, p, a, wanted, far in pieces
        )
    )


@dataclass(frozen=True)
class CacheShard:
    """This rank's part of the KV cache."""

    axis: Axis
    cache: KVCache
    windows: frozenset[int | None]
    """Attention windows of the model's layers; None for full attention."""

    @staticmethod
    def of(model: Transformer, cache: KVCache) -> "CacheShard":
        """The part of this rank of ``model``."""
        windows = frozenset(model.config.window_of(i) for i in range(model.config.layers))
        return CacheShard(model.axes.cp, cache, windows)

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all pages."""
        return self.axis.size == 1

    @property
    def scratch_page(self) -> int:
        """The page for padded writes and for those that belong to other ranks, where there is one."""
        return self.cache.pages - 1

    def local_pages(self, piece: Slice) -> Sequence[int]:
        """This rank's pages of a request's page table, by their numbers in its own cache."""
        if self.is_whole:
            return piece.pages
        ranks, rank = self.axis.size, self.axis.rank
        return [page // ranks for page in piece.pages if page % ranks == rank]

    def local_length(self, piece: Slice) -> int:
        """How many of a request's keys, including those of ``piece``, are in this rank's cache."""
        end, size = piece.start + len(piece.tokens), self.cache.page_tokens
        if self.is_whole:
            return end
        ranks, rank = self.axis.size, self.axis.rank
        unfilled = len(piece.pages) * size - end if piece.pages[-1] % ranks == rank else 0
        return sum(page % ranks == rank for page in piece.pages) * size - unfilled

    def slots(self, piece: Slice) -> list[int]:
        """Slots in this rank's cache for the keys and values of ``piece``."""
        size = self.cache.page_tokens
        if self.is_whole:
            return piece.slots(size)
        ranks, rank = self.axis.size, self.axis.rank
        located = (divmod(slot, size) for slot in piece.slots(size))
        scratch = self.scratch_page * size
        return [p // ranks * size + offset if p % ranks == rank else scratch for p, offset in located]

    def decode_row(self, piece: Slice) -> tuple[int, int, Sequence[int]]:
        """(slot, length, pages) of a slice of one token."""
        if self.is_whole:
            page, offset = divmod(piece.start, self.cache.page_tokens)
            return piece.pages[page] * self.cache.page_tokens + offset, piece.start + 1, piece.pages
        return self.slots(piece)[0], self.local_length(piece), self.local_pages(piece)

    def sharded_attend(
        self, slices: Sequence[Slice], table: PageTable, slots_T: Tensor, positions_T: Tensor, kernels: str = "auto"
    ) -> ShardedPaged:
        """The model's ``attend`` where ranks share the cache; ``table`` has this rank's pages."""
        device = positions_T.device
        counts = [len(piece.tokens) for piece in slices]
        counts += [1] * (len(positions_T) - sum(counts))  # padding of a decode batch
        request_T = upload([r for r, n in enumerate(counts) for _ in range(n)], torch.int64, device)
        new = TokenRows(positions_T, request_T, table.cu_queries, max(counts), 0)
        windows = self.windows if max(counts) > 1 else self.windows - {None}
        past = {window: self._past(slices, len(counts), window, device) for window in windows}
        return ShardedPaged(self.axis, self.cache, table, slots_T, new, past, kernels)

    def _past(self, slices: Sequence[Slice], requests: int, window: int | None, device: torch.device) -> CachedKeys:
        """This rank's keys before each slice, within the window of at least one of its tokens."""
        size, ranks, rank = self.cache.page_tokens, self.axis.size, self.axis.rank
        slots, positions, counts = [], [], []
        offset_p = torch.arange(size)
        for piece in slices:
            first = 0 if window is None else max(0, piece.start - window + 1)
            indices = range(first // size, -(-piece.start // size))
            local = [(i, piece.pages[i] // ranks) for i in indices if piece.pages[i] % ranks == rank]
            index_P, page_P = torch.tensor(local, dtype=torch.int64).view(-1, 2).T
            position_S = (index_P[:, None] * size + offset_p).flatten()
            older = position_S < piece.start
            slots.append((page_P[:, None] * size + offset_p).flatten()[older])
            positions.append(position_S[older])
            counts.append(len(positions[-1]))
        counts += [0] * (requests - len(counts))

        def put(x: Tensor) -> Tensor:
            return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x

        request_S = torch.arange(requests).repeat_interleave(torch.tensor(counts))
        cu_keys = upload([0, *accumulate(counts)], torch.int32, device)
        rows = TokenRows(put(torch.cat(positions)), put(request_S), cu_keys, max(counts), 0)
        return CachedKeys(put(torch.cat(slots)), rows)


def build_inputs(
    shard: CacheShard, work: Work, *, share: bool = True
) -> tuple[Stream, Paged | ShardedPaged | EncoderDecoderAttend, NextTokens]:
    """The model's arguments (stream, attend, head) for ``work``; ``share``: keys of several requests are read once."""
    device = shard.cache.k[0].device
    tokens, positions, slots, tables, rows, scored = [], [], [], [], [], []
    for piece in work.slices:
        scored.extend((len(tokens) + i, target) for i, target in enumerate(piece.targets) if target >= 0)
        tokens.extend(piece.tokens)
        positions.extend(range(piece.start, piece.start + len(piece.tokens)))
        slots.extend(shard.slots(piece))
        tables.append(shard.local_pages(piece))
        if piece.sample_args is not None:
            rows.append(len(tokens) - 1)
    counts = [len(piece.tokens) for piece in work.slices]
    lengths = [shard.local_length(piece) for piece in work.slices]
    widest = max(map(len, tables))
    attend = Paged(
        shard.cache,
        pages_RP=upload([[*table, *[0] * (widest - len(table))] for table in tables], torch.int32, device),
        slots_T=upload(slots, torch.int64, device),
        cu_queries=upload([0, *accumulate(counts)], torch.int32, device),
        lengths_R=upload(lengths, torch.int32, device),
        longest_query=max(counts),
        longest_context=max(lengths),
        known=(counts, lengths),
        known_pages=tables,
        share=share,
    )
    prompt = None
    if scored:
        most = max(piece.alternatives for piece in work.slices)
        rows_S, targets_S = upload(list(zip(*scored, strict=True)), torch.int64, device)
        prompt = PromptTargets(rows_S, targets_S, most)
    head = NextTokens(upload(rows, torch.int64, device), work.sample_args, prompt)
    stream = Stream(upload(tokens, torch.int64, device), upload(positions, torch.int64, device))
    if any(piece.source_length for piece in work.slices):
        stream, crossed = _with_sources(shard.cache, work, stream, attend)
        return stream, crossed, head
    if shard.is_whole:
        return stream, attend, head
    return stream, shard.sharded_attend(work.slices, attend.table, attend.slots_T, stream.positions_T), head


def _with_sources(cache: KVCache, work: Work, stream: Stream, own: Paged) -> tuple[Stream, EncoderDecoderAttend]:
    """The stream with the sources that the pass encodes, and attention to the sources of all its requests."""
    device, new = cache.k[0].device, [piece for piece in work.slices if piece.source]
    slots = [slot for piece in new for slot in piece.source_slots(cache.page_tokens)]
    memory = PagedMemory.of(
        cache,
        upload(slots, torch.int64, device),
        [list(piece.source_pages) for piece in work.slices],
        [piece.source_length for piece in work.slices],
        [len(piece.tokens) for piece in work.slices],
    )
    if not new:
        return stream, EncoderDecoderAttend(own, None, memory)
    lengths = [len(piece.source) for piece in new]
    tokens_S = upload([token for piece in new for token in piece.source], torch.int64, device)
    positions_S = upload([i for n in lengths for i in range(n)], torch.int64, device)
    return stream._replace(source=Source(tokens_S, positions_S)), EncoderDecoderAttend(
        own, Packed.of(lengths, device, causal=False), memory
    )
