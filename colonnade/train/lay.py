"""A micro-batch as a model takes it: the stream, who sees whom, what comes out; or a context rank's share of them."""

import torch
from torch import Tensor

from colonnade.config import ModelConfig
from colonnade.data import Batch
from colonnade.model import IGNORE, Loss, Orders, Packed, Pretraining, Ring, Stream
from colonnade.parallel.axis import Axis


def lay(
    batch: Batch, config: ModelConfig, cp: Axis, smoothing: float = 0.0, order_weight: Tensor | float = 1.0
) -> tuple[Stream, Packed | Ring, Loss | Pretraining]:
    """(stream, attend, head) of ``batch`` on this rank of the context axis; the head gives (loss sum, its tokens).

    ``order_weight`` is what the order of a pair counts beside a token (BERT's second loss).
    """
    packed = Packed(batch.cu_seqlens, batch.longest, batch.equal, causal=config.causal)
    stream = Stream(batch.tokens_T, batch.positions_T, batch.segments_T)
    targets_R, rows_R, first_R, orders_R = batch.targets_T, batch.predicted_R, batch.first_R, batch.orders_R
    if rows_R is not None:
        targets_R = targets_R[rows_R]
    attend = packed
    if cp.size > 1:
        attend = Ring.of(packed, len(batch.tokens_T), cp)
        mine_t = attend.index_t
        segments_t = None if batch.segments_T is None else batch.segments_T[mine_t]
        stream = Stream(batch.tokens_T[mine_t], batch.positions_T[mine_t], segments_t)
        # Where each token of the whole stream stands here, or -1: shapes do not depend on what is where.
        here_T = torch.full_like(batch.tokens_T, -1)
        here_T[mine_t] = torch.arange(len(mine_t), device=mine_t.device)
        if rows_R is None:
            targets_R = targets_R[mine_t]
        else:
            rows_R, targets_R = _on_this_rank(here_T[rows_R], targets_R)
        if first_R is not None and orders_R is not None:
            first_R, orders_R = _on_this_rank(here_T[first_R], orders_R)
    tokens = Loss(targets_R, smoothing, rows_R)
    if config.top != "pretraining":
        return stream, attend, tokens
    assert first_R is not None, "this model trains on pairs"
    assert orders_R is not None
    return stream, attend, Pretraining(tokens, Orders(first_R), orders_R, order_weight)


def _on_this_rank(row_R: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and targets of what is on this rank (row >= 0); the others point to row 0 and have no target."""
    return row_R.clamp(min=0), target_R.where(row_R >= 0, IGNORE)
