"""A micro-batch as a model takes it: the stream, who sees whom, the loss; or this context rank's share of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colonnade.config import ModelConfig, MoeConfig, TrainConfig
from colonnade.data import Batch
from colonnade.model import (
    IGNORE,
    ClassLoss,
    Dropout,
    DropoutRates,
    Loss,
    Packed,
    Pretraining,
    Ring,
    SentenceOrders,
    Stream,
    Transformer,
)
from colonnade.model.moe import DispatchOptions, LayerReport, Routing, TokenGroups
from colonnade.model.moe.router import needs_sequences, uses_noise
from colonnade.model.moe.routing_context import ModelBalance


@dataclass(frozen=True)
class Terms:
    """What a step asks of the loss of each of its micro-batches; as it stands, of a validation."""

    smoothing: float = 0.0
    """Label smoothing."""
    order_weight: Tensor | float = 1.0
    """What the order of a pair counts beside a token (BERT's second loss)."""
    noise: Dropout | None = None
    """What is random in the step, of whatever tokens; None drops nothing."""
    router_weight: Tensor | None = None
    """What a unit of the routers' loss sums counts in the gradient; None in a validation."""
    steps: Sequence[DispatchOptions] = (DispatchOptions(),)
    """How layers of experts spread their work."""
    moe: MoeConfig | None = None
    """What they decide by, where it is not the model's own."""
    reports: list[Mapping[int, LayerReport]] = field(default_factory=list)
    """Filled as micro-batches are laid: where their layers of experts will report."""
    pooled: list[ModelBalance] = field(default_factory=list)
    """Likewise: their balance losses over all layers together."""


VALIDATION = Terms()


def model_inputs(
    batch: Batch, model: Transformer, terms: Terms = VALIDATION
) -> tuple[Stream, Packed | Ring, Loss | Pretraining | ClassLoss]:
    """(stream, attend, head) of ``batch`` on this rank; the head gives (loss sum, number of targets)."""
    T, cp, config, noise = len(batch.tokens_T), model.axes.cp, model.config, terms.noise
    if noise is not None:
        noise = noise.for_tokens(numbers(batch))
    first_head, _ = model.axes.tp.part(config.heads)
    cu, longest, equal = batch.cu_seqlens, batch.longest, batch.equal
    attend = Packed(cu, longest, equal, causal=config.causal, dropout=noise, first_head=first_head)
    routing = None
    if config.moe is not None:
        groups = TokenGroups.sequences(cu, T, model.axes.dp) if needs_sequences(config.moe) else None
        if config.moe.router.kind == "task" and batch.tasks_T is not None:
            groups = TokenGroups(batch.tasks_T, config.moe.router.tasks)
        routing = Routing(numbers(batch), terms.router_weight, token_groups=groups, dispatch=terms.steps, moe=terms.moe)
        if terms.router_weight is not None:
            terms.reports.append(routing.reports)
            terms.pooled.append(routing.pooled)
    stream = Stream(batch.tokens_T, batch.positions_T, batch.segments_T, noise, routing)
    targets_R, rows_R, first_R, orders_R = batch.targets_T, batch.predicted_R, batch.first_R, batch.orders_R
    if rows_R is not None:
        targets_R = targets_R[rows_R]
    if cp.size > 1:
        attend = Ring.of(attend, T, cp)
        mine_t = attend.index_t
        segments_t, mine = None if batch.segments_T is None else batch.segments_T[mine_t], noise and noise.rows(mine_t)
        routing = routing and routing.rows(mine_t)
        stream = Stream(batch.tokens_T[mine_t], batch.positions_T[mine_t], segments_t, mine, routing)
        # Where each token of the whole stream stands here, or -1: shapes do not depend on what is where.
        here_T = torch.full_like(batch.tokens_T, -1)
        here_T[mine_t] = torch.arange(len(mine_t), device=mine_t.device)
        if rows_R is None:
            targets_R = targets_R[mine_t]
        else:
            rows_R, targets_R = _on_this_rank(here_T[rows_R], targets_R, len(mine_t))
        if first_R is not None and orders_R is not None:
            first_R, orders_R = _on_this_rank(here_T[first_R], orders_R, len(mine_t))
    if config.top == "classes":
        assert rows_R is not None, "a classifier trains on labelled sequences"
        assert batch.predicted_R is not None
        pooled = noise and noise.rows(batch.predicted_R[: len(rows_R)]).at_embedding
        return stream, attend, ClassLoss(rows_R, targets_R, terms.smoothing, pooled)
    tokens = Loss(targets_R, terms.smoothing, rows_R)
    if config.top != "pretraining":
        return stream, attend, tokens
    assert first_R is not None, "this model trains on pairs"
    assert orders_R is not None
    return stream, attend, Pretraining(tokens, SentenceOrders(first_R), orders_R, terms.order_weight)


def noise_of(train: TrainConfig, number: int, model: ModelConfig, device: torch.device) -> Dropout | None:
    """What is random in step ``number``, of no tokens yet; None when nothing is."""
    rates = DropoutRates(train.dropout, train.attention_dropout, train.embedding_dropout, train.expert_dropout)
    if not any(rates) and not (model.moe and uses_noise(model.moe)):
        return None
    return Dropout.of(train.seed, number, model.layers, torch.empty(0, dtype=torch.int64, device=device), rates)


def numbers(batch: Batch) -> Tensor:
    """Each token's number in the step's global batch, by its sample and its place there: not by the micro-batch."""
    row_T = torch.arange(len(batch.tokens_T), device=batch.tokens_T.device)
    if batch.first_R is None:
        return batch.first + row_T
    sample_T = torch.searchsorted(batch.first_R, row_T, right=True) - 1
    stride = batch.stride or len(row_T) // len(batch.first_R)
    return batch.first + sample_T * stride + row_T - batch.first_R[sample_T]


def _on_this_rank(row_R: Tensor, target_R: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Rows and targets of what is on this rank (row >= 0), which has so many tokens; the others point to row 0 and have
    no target. Where there is no token there is no row 0 either, and nothing is asked.
    """
    if tokens == 0:
        return row_R[:0], target_R[:0]
    return row_R.clamp(min=0), target_R.where(row_R >= 0, IGNORE)
