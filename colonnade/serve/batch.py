"""A :class:`Work` as the tensors of one forward pass: the only place where serving meets the model's arguments.

    slot of position i = pages[i // page_tokens] · page_tokens + i mod page_tokens

A slot is where the token's key and value are written; pages of the requests' tables are what attention reads.
"""

from itertools import accumulate

import torch
from torch import Tensor

from colonnade.model import KVCache, Paged, Stream, Transformer
from colonnade.serve.sampler import NextTokens
from colonnade.serve.scheduler import Work


@torch.inference_mode()
def forward(model: Transformer, cache: KVCache, work: Work) -> Tensor:
    """Run ``work``; the next tokens_R of the R slices that draw one, in order (R may be 0), on every rank."""
    return model(*arguments(cache, work))


def arguments(cache: KVCache, work: Work) -> tuple[Stream, Paged, NextTokens]:
    """``work`` as (stream, attend, head)."""
    size, device = cache.page_tokens, cache.k[0].device
    tokens, positions, slots, tables, rows, draws = [], [], [], [], [], []
    for piece in work.slices:
        span = range(piece.start, piece.start + len(piece.tokens))
        tokens.extend(piece.tokens)
        positions.extend(span)
        slots.extend(piece.pages[i // size] * size + i % size for i in span)
        tables.append(piece.pages)
        if piece.draw is not None:
            rows.append(len(tokens) - 1)
            draws.append(piece.draw)
    counts = [len(piece.tokens) for piece in work.slices]
    lengths = [piece.start + len(piece.tokens) for piece in work.slices]
    widest = max(map(len, tables))

    def whole(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    attend = Paged(
        cache,
        pages_RP=whole([[*table, *[0] * (widest - len(table))] for table in tables], torch.int32),
        slots_T=whole(slots, torch.int64),
        cu_queries=whole([0, *accumulate(counts)], torch.int32),
        lengths_R=whole(lengths, torch.int32),
        longest_query=max(counts),
        longest_context=max(lengths),
    )
    head = NextTokens(whole(rows, torch.int64), draws)
    return Stream(whole(tokens, torch.int64), whole(positions, torch.int64)), attend, head
