"""A micro-batch as a model takes it: the stream, who sees whom, the targets; or this context rank's share of them."""

import torch
from torch import Tensor

from colonnade.config import TrainConfig
from colonnade.data import Batch
from colonnade.model import Noise, Packed, Rates, Ring, Stream, Transformer


def lay(batch: Batch, model: Transformer, noise: Noise | None = None) -> tuple[Stream, Packed | Ring, Tensor]:
    """(stream, attend, targets_t) of ``batch`` on this rank; ``noise`` is that of the step, of whatever tokens."""
    T, cp = len(batch.tokens_T), model.axes.cp
    if noise is not None:
        noise = noise.of_tokens(batch.first + torch.arange(T, device=batch.tokens_T.device))
    head, _ = model.axes.tp.part(model.config.heads)
    packed = Packed(batch.cu_seqlens, batch.longest, batch.equal, noise=noise, head=head)
    if cp.size == 1:
        return Stream(batch.tokens_T, batch.positions_T, noise), packed, batch.targets_T
    ring = Ring.of(packed, T, cp)
    mine_t = ring.index_t
    stream = Stream(batch.tokens_T[mine_t], batch.positions_T[mine_t], noise and noise.rows(mine_t))
    return stream, ring, batch.targets_T[mine_t]


def noise_of(train: TrainConfig, number: int, layers: int, device: torch.device) -> Noise | None:
    """What is random in step ``number``, of no tokens yet; None when nothing is dropped."""
    rates = Rates(residual=train.dropout, attention=train.attention_dropout, embedding=train.embedding_dropout)
    if not any(rates):
        return None
    return Noise.of(train.seed, number, layers, torch.empty(0, dtype=torch.int64, device=device), rates)
