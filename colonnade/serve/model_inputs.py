"""A :class:`Work` as the tensors of one forward pass: the only place where serving meets the model's arguments.

Slots are where the tokens' keys and values are written; pages of the requests' tables are what attention reads. A token
may be negative, -1 - r, for the token that draw r of the work before gave.
"""

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from colonnade.kernels.device import upload
from colonnade.kernels.registry import choose
from colonnade.model import KVCache, Paged, Stream, Transformer, fused_block
from colonnade.model.sharded_kv_cache import ShardedPaged
from colonnade.serve.batch_invariance import one_by_one
from colonnade.serve.cache_shard import CacheShard
from colonnade.serve.cuda_graph_runner import CudaGraphRunner
from colonnade.serve.sampler import NextTokens, sample, sample_each
from colonnade.serve.scheduler import Work


class Runner:
    """Runs one :class:`Work` after another on this rank's share of the model and of the cache."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        fixed: CudaGraphRunner | None = None,
        *,
        share: bool = True,
        invariant: str | None = None,
    ):
        """``fixed`` takes the steps that it can; ``share``: keys of several requests are read once. ``invariant``: the
        attention of :func:`invariant.prepare`.
        """
        self.model, self.cache, self.fixed, self.share, self.invariant = model, cache, fixed, share, invariant
        if invariant is None:  # whose kernels are others
            fused_block.prepare(model)
        self._held = CacheShard.of(model, cache)
        self._one_by_one = invariant is not None and not cache.k[0].is_cuda
        self._last_R = torch.zeros(1, dtype=torch.int64, device=cache.k[0].device)
        """What the last work drew: the next one may begin with these tokens before the host has seen them."""

    @torch.inference_mode()
    def __call__(self, work: Work) -> "Drawn":
        """Run ``work``; the next tokens of the R slices that draw one, in order (R may be 0), on every rank."""
        axes = self.model.axes
        if self.fixed is not None and self.fixed.take(work):
            logits_Rv = self.fixed(work, self._last_R)
            draw = sample_each if self.invariant else sample
            tokens_R = draw(logits_Rv, work.draws, axes.tp, self.model.config.vocab_size)
        else:
            passes = one_by_one(work, self.cache.page_tokens) if self._one_by_one else [work]
            tokens_R = torch.cat([self._run(each) for each in passes])
        if work.draws:
            # Context ranks compute the same, but sums over their tensor ranks may differ in the last bit.
            self._last_R = tokens_R = axes.cp.firsts_(tokens_R)
        return Drawn(tokens_R)

    def _run(self, work: Work) -> Tensor:
        stream, attend, head = arguments(self._held, work, share=self.share)
        if self.invariant:
            assert isinstance(attend, Paged), "invariance is for one rank"
            attend, head = replace(attend, kernels=self.invariant, share=False), replace(head, each=True)
        if any(piece.tokens[-1] < 0 for piece in work.slices):
            choose("write_next_tokens", stream.tokens_T.device.type, torch.int64)(stream.tokens_T, self._last_R)
        return self.model(stream, attend, head)


class Drawn:
    """Tokens on their way from the device to the host, which need not wait for what the device does after them."""

    def __init__(self, tokens_R: Tensor):
        self._arrived: torch.cuda.Event | None = None
        self._tokens_R = tokens_R
        if tokens_R.is_cuda:
            self._tokens_R = torch.empty_like(tokens_R, device="cpu", pin_memory=True)
            self._tokens_R.copy_(tokens_R, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def tolist(self) -> list[int]:
        """The tokens, when they are here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tokens_R.tolist()


def arguments(held: CacheShard, work: Work, *, share: bool = True) -> tuple[Stream, Paged | ShardedPaged, NextTokens]:
    """``work`` as (stream, attend, head), for a rank that holds this of the cache."""
    cache, device = held.cache, held.cache.k[0].device
    tokens, positions, slots, tables, rows = [], [], [], [], []
    for piece in work.slices:
        tokens.extend(piece.tokens)
        positions.extend(range(piece.start, piece.start + len(piece.tokens)))
        slots.extend(held.slots(piece))
        tables.append(held.pages(piece))
        if piece.draw is not None:
            rows.append(len(tokens) - 1)
    counts = [len(piece.tokens) for piece in work.slices]
    lengths = [held.keys(piece) for piece in work.slices]
    widest = max(map(len, tables))

    def whole(values: list, dtype: torch.dtype) -> Tensor:
        return upload(values, dtype, device)

    attend = Paged(
        cache,
        pages_RP=whole([[*table, *[0] * (widest - len(table))] for table in tables], torch.int32),
        slots_T=whole(slots, torch.int64),
        cu_queries=whole([0, *accumulate(counts)], torch.int32),
        lengths_R=whole(lengths, torch.int32),
        longest_query=max(counts),
        longest_context=max(lengths),
        known=(counts, lengths),
        known_pages=tables,
        share=share,
    )
    head = NextTokens(whole(rows, torch.int64), work.draws)
    stream = Stream(whole(tokens, torch.int64), whole(positions, torch.int64))
    if held.whole:
        return stream, attend, head
    return stream, held.split(work.slices, attend.table, attend.slots_T, stream.positions_T), head
