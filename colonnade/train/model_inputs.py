"""Builds the model's arguments (stream, attend, head) from a micro-batch, or this context rank's share of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from colonnade.config import ModelConfig, MoeConfig, TrainConfig
from colonnade.data import Batch
from colonnade.model import (
    IGNORE,
    ChoiceLoss,
    ClassLoss,
    Dropout,
    DropoutRates,
    EncoderDecoderAttend,
    Loss,
    Packed,
    PackedMemory,
    Pretraining,
    Ring,
    SentenceOrders,
    Source,
    SpanLoss,
    Stream,
    Transformer,
)
from colonnade.model.class_distill_loss import ClassDistillation
from colonnade.model.contrastive import ContrastiveLoss, Embeddings
from colonnade.model.distill_loss import Distillation
from colonnade.model.moe import DispatchOptions, LayerReport, Routing, TokenGroups
from colonnade.model.moe.router import needs_sequences, uses_noise
from colonnade.model.moe.routing_context import ModelBalance
from colonnade.model.policy_loss import PolicyLoss, PolicySettings
from colonnade.model.preference_loss import PreferenceLoss, SequenceLogprobs

if TYPE_CHECKING:
    from colonnade.train.distill import Distiller


@dataclass(frozen=True)
class StepContext:
    """Inputs shared by all micro-batches of a step: loss weights, dropout, routing. The defaults are those of
    validation.
    """

    label_smoothing: float = 0.0
    order_loss_weight: Tensor | float = 1.0
    """Weight of a pair's order loss (BERT's second loss) relative to a token's."""
    dropout: Dropout | None = None
    """The step's random numbers, for any tokens; None: no dropout."""
    router_loss_weight: Tensor | None = None
    """Weight of the router loss sums in the gradient; None in validation."""
    source_router_loss_weight: Tensor | None = None
    """The same for an encoder's tokens."""
    spread: Sequence[DispatchOptions] = (DispatchOptions(),)
    """Expert parallelism of the MoE layers."""
    moe: MoeConfig | None = None
    """Routing settings that replace the model's own."""
    reports: list[Mapping[int, LayerReport]] = field(default_factory=list)
    """Output: the routing reports of each micro-batch, by layer."""
    distiller: "Distiller | None" = None
    """A teacher to imitate; None in validation."""
    pooled: list[ModelBalance] = field(default_factory=list)
    """Output: each micro-batch's balance loss over all layers together."""


VALIDATION = StepContext()


LossHead = (
    Loss | Pretraining | ClassLoss | ChoiceLoss | SpanLoss
    | Distillation | ClassDistillation | PreferenceLoss | SequenceLogprobs | PolicyLoss | ContrastiveLoss
)  # fmt: skip
"""Heads that give (loss sum, number of targets)."""


def model_inputs(
    batch: Batch, model: Transformer, step: StepContext = VALIDATION
) -> tuple[Stream, Packed | Ring | EncoderDecoderAttend, LossHead]:
    """(stream, attend, head) of ``batch`` on this rank; the head gives (loss sum, number of targets)."""
    T, cp, config, dropout = len(batch.tokens_T), model.axes.cp, model.config, step.dropout
    if dropout is not None:
        dropout = dropout.for_tokens(global_token_ids(batch))
    first_head, _ = model.axes.tp.part(config.heads)
    cu, longest, equal = batch.cu_seqlens, batch.longest, batch.equal
    attend = Packed(cu, longest, equal, causal=config.causal, dropout=dropout, first_head=first_head)
    routing = None
    if config.moe is not None:
        groups = TokenGroups.sequences(cu, T, model.axes.dp) if needs_sequences(config.moe) else None
        if config.moe.router.kind == "task" and batch.tasks_T is not None:
            groups = TokenGroups(batch.tasks_T, config.moe.router.tasks)
        ids_T = global_token_ids(batch)
        routing = Routing(ids_T, step.router_loss_weight, token_groups=groups, dispatch=step.spread, moe=step.moe)
        if step.router_loss_weight is not None:
            step.reports.append(routing.reports)
            step.pooled.append(routing.pooled)
    stream = Stream(batch.tokens_T, batch.positions_T, batch.segments_T, dropout, routing)
    if config.encoder is not None:
        source, crossed = _source(batch, attend, model, dropout, step, routing)
        loss = Loss(batch.targets_T, step.label_smoothing)
        return stream._replace(source=source), crossed, loss
    targets_R, rows_R, first_R, orders_R = batch.targets_T, batch.predicted_R, batch.first_R, batch.orders_R
    sequence_R = batch.sequence_T
    if rows_R is not None:
        targets_R = targets_R[rows_R]
        sequence_R = None if sequence_R is None else sequence_R[rows_R]
    if cp.size > 1:
        attend = Ring.of(attend, T, cp)
        index_t = attend.index_t
        stream = Stream(
            batch.tokens_T[index_t],
            batch.positions_T[index_t],
            None if batch.segments_T is None else batch.segments_T[index_t],
            dropout and dropout.rows(index_t),
            routing and routing.rows(index_t),
        )
        # The local row of each token of the whole stream, or -1: the shapes do not depend on the distribution.
        local_T = torch.full_like(batch.tokens_T, -1)
        local_T[index_t] = torch.arange(len(index_t), device=index_t.device)
        if rows_R is None:
            targets_R = targets_R[index_t]
            sequence_R = None if sequence_R is None else sequence_R[index_t]
        else:
            rows_R, targets_R = _local_rows(local_T[rows_R], targets_R, len(index_t))
        if first_R is not None and orders_R is not None:
            first_R, orders_R = _local_rows(local_T[first_R], orders_R, len(index_t))
    if sequence_R is not None:
        return stream, attend, _preference_loss(batch, targets_R, sequence_R[: len(targets_R)], rows_R)
    if batch.contrast is not None:
        return stream, attend, _contrastive_loss(batch)
    if batch.policy_4T is not None:
        assert cp.size == 1, "reward tuning is for data and tensor ranks"
        policy_4R = batch.policy_4T if rows_R is None else batch.policy_4T[:, rows_R]
        settings = PolicySettings(**batch.policy)
        return stream, attend, PolicyLoss(targets_R, policy_4R, rows_R, settings, batch.observed)
    if config.task_head == "classes":
        assert rows_R is not None, "a classifier trains on labelled sequences"
        assert batch.predicted_R is not None
        pooler_dropout = dropout.rows(batch.predicted_R[: len(rows_R)]).at_embedding if dropout else None
        if config.classes == 1:
            assert first_R is not None, "the choices of a question are one sample"
            choices = len(batch.predicted_R) // len(first_R)
            labels_Q = targets_R[::choices]
            return stream, attend, ChoiceLoss(rows_R, choices, labels_Q, step.label_smoothing, pooler_dropout)
        labels = ClassLoss(rows_R, targets_R, step.label_smoothing, pooler_dropout)
        if step.distiller is not None:
            return stream, attend, step.distiller.class_head(stream, attend, labels, batch.step_classes)
        return stream, attend, labels
    if config.task_head == "spans":
        assert first_R is not None, "span targets belong to sequences"
        return stream, attend, SpanLoss(cu, longest, first_R, targets_R.reshape(-1, 2))
    if step.distiller is not None:
        return stream, attend, step.distiller.head(stream, attend, targets_R, batch.sampled_T)
    tokens = Loss(targets_R, step.label_smoothing, rows_R)
    if config.task_head != "pretraining":
        return stream, attend, tokens
    assert first_R is not None, "this model trains on pairs"
    assert orders_R is not None
    return stream, attend, Pretraining(tokens, SentenceOrders(first_R), orders_R, step.order_loss_weight)


def _contrastive_loss(batch: Batch) -> ContrastiveLoss:
    assert batch.text_ids_S is not None, "samples of embeddings are texts"
    assert batch.first_R is not None
    ends = batch.cu_seqlens[: len(batch.text_ids_S) + 1]
    cached = None
    if batch.embedding_gradient_SD is not None and batch.embedding_loss is not None:
        cached = batch.embedding_gradient_SD, batch.embedding_loss
    embeddings = Embeddings(ends, batch.contrast.pooling, normalize=False)
    return ContrastiveLoss(embeddings, batch.text_ids_S, batch.targets_T[batch.first_R], batch.contrast, cached)


def _preference_loss(
    batch: Batch, targets_R: Tensor, sequence_R: Tensor, rows_R: Tensor | None
) -> PreferenceLoss | SequenceLogprobs:
    assert batch.reference_S is not None, "preferences have sequences and reference scores"
    sequences = SequenceLogprobs(targets_R, sequence_R, len(batch.reference_S), rows_R)
    if batch.preference is None:
        return sequences
    return PreferenceLoss(sequences, batch.targets_per_sequence, batch.reference_S, *batch.preference)


def _source(
    batch: Batch, own: Packed, model: Transformer, dropout: Dropout | None, step: StepContext, routing: Routing | None
) -> tuple[Source, EncoderDecoderAttend]:
    """(source, attend) of an encoder–decoder; ``routing`` is that of the targets."""
    assert batch.source_tokens_S is not None, "an encoder–decoder trains on pairs"
    assert batch.source_positions_S is not None
    assert batch.cu_sources is not None
    layers, encoder = model.config.layers, model.config.encoder
    assert encoder is not None
    of_source = across = index_S = None
    S = len(batch.source_tokens_S)
    if dropout is not None or routing is not None:
        assert batch.stride is not None
        row_S = torch.arange(S, device=batch.cu_sources.device)
        sample_S = torch.searchsorted(batch.cu_sources[1:], row_S, right=True)
        index_S = batch.first + sample_S * batch.stride + batch.source_positions_S
    if routing is not None:
        assert index_S is not None
        assert model.config.moe is not None
        groups = None
        if needs_sequences(model.config.moe):
            groups = TokenGroups.sequences(batch.cu_sources, S, model.axes.dp)
        # Its reports are those of the same pass.
        routing = replace(routing, index_T=index_S, weight=step.source_router_loss_weight, token_groups=groups)
    if dropout is not None:
        assert index_S is not None
        of_source = dropout.after(layers).for_tokens(index_S)
        across = dropout.after(layers + 1 + encoder.layers)
    attend = Packed(
        batch.cu_sources, batch.longest_source, batch.equal_sources, causal=False, dropout=of_source,
        first_head=own.first_head,
    )  # fmt: skip
    memory = PackedMemory(
        batch.cu_sources, own.cu_seqlens, across, index_S, own.first_head,
        longest=(own.longest, batch.longest_source), equal=own.equal and batch.equal_sources,
    )  # fmt: skip
    source = Source(batch.source_tokens_S, batch.source_positions_S, of_source, routing)
    return source, EncoderDecoderAttend(own, attend, memory)


def step_dropout(train: TrainConfig, number: int, model: ModelConfig, device: torch.device) -> Dropout | None:
    """The dropout of step ``number``, not bound to tokens yet; None when nothing in the step is random."""
    rates = DropoutRates(train.dropout, train.attention_dropout, train.embedding_dropout, train.expert_dropout)
    if not any(rates) and not (model.moe and uses_noise(model.moe)):
        return None
    layers = model.layers
    if model.encoder is not None:  # then the encoder's embedding and blocks, and the decoder's cross attention
        layers += 1 + model.encoder.layers + 1 + model.layers
    return Dropout.of(train.seed, number, layers, torch.empty(0, dtype=torch.int64, device=device), rates)


def global_token_ids(batch: Batch) -> Tensor:
    """Each token's index in the step's global batch, independent of how it is cut into micro-batches."""
    row_T = torch.arange(len(batch.tokens_T), device=batch.tokens_T.device)
    if batch.first_R is None:
        return batch.first + row_T
    sample_T = torch.searchsorted(batch.first_R, row_T, right=True) - 1
    stride = batch.stride or len(row_T) // len(batch.first_R)
    return batch.first + sample_T * stride + row_T - batch.first_R[sample_T]


def _local_rows(row_R: Tensor, target_R: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Rows and targets on this rank, which has ``tokens`` tokens; other entries (row < 0) get row 0 and no target.

    Both are empty on a rank without tokens, which has no row 0.
    """
    if tokens == 0:
        return row_R[:0], target_R[:0]
    return row_R.clamp(min=0), target_R.where(row_R >= 0, IGNORE)
