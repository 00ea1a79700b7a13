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
