"""Output heads: the result of a forward pass (logits, losses, hidden states), an argument like ``attend``.

BERT's layers above its blocks are the masked-token transform, the pooler, and one small layer for each task:

    masked tokens   logits = W_embed norm(act(W x + b)) + b_vocab
    pooled          p = tanh(W x_first + b)                  x_first: the sequence's first token, [CLS]
    order, classes  logits = W p + b                         sentence order: in order, swapped
    spans           logits = W x + b                         (start, end) of an answer, for every token

(Devlin 2019, arXiv 1810.04805; sentence-order prediction: Lan 2020, arXiv 1909.11942, section 3.1.) Only the vocabulary
bias is cut over tp, like the embedding's rows. The other layers see few tokens or have few outputs: every rank computes
them whole, so their gradients are whole too. :attr:`ModelConfig.top` determines which of them a model has, the head
which of them a forward pass uses. ``first_R`` is where each of R sequences starts in the stream.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config import ModelConfig
from colonnade.kernels.experts.reference import ACTIVATIONS
from colonnade.kernels.linear.quantise import Quantised, dequantise
from colonnade.model.dropout import POOLED, BlockDropout
from colonnade.model.loss import IGNORE, cross_entropy_sum
from colonnade.model.norm import Norm
from colonnade.model.tensor_parallel_linear import Linear, Matrix, linear
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import WHOLE, Placement


class BertLayers(nn.Module):
    """The layers that ``config.task_head`` names."""

    def __init__(self, config: ModelConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.act = ACTIVATIONS[config.activation]
        self.layout: dict[str, Placement] = {}

        def dense(name: str, wanted: bool, outputs: int) -> Linear | None:
            if not wanted:
                return None
            self.layout |= {f"{name}.weight": WHOLE, f"{name}.bias": WHOLE}
            return Linear(config.width, outputs, bias=True, device=device, dtype=dtype)

        self.transform = dense("transform", config.has_transform, config.width)
        self.norm = self.bias = None
        if config.has_transform:
            start, stop = axes.tp.part(config.vocab_size)
            self.norm = Norm(config, config.width, device=device, dtype=dtype)
            self.bias = nn.Parameter(torch.empty(stop - start, device=device, dtype=dtype))
            self.layout["bias"] = 0
        self.pooler = dense("pooler", config.has_pooler, config.width)
        self.order = dense("order", config.task_head == "pretraining", 2)
        self.classes = dense("classes", config.task_head == "classes", config.classes)
        self.spans = dense("spans", config.task_head == "spans", 2)

    def transform_masked(self, x_RD: Tensor) -> Tensor:
        """The input of the vocabulary projection."""
        assert self.transform is not None, "this top predicts no masked tokens"
        assert self.norm is not None
        return self.norm(self.act(self.transform(x_RD)))

    def pooled(self, x_RD: Tensor) -> Tensor:
        """p_RD of the sequences with first tokens ``x_RD``."""
        assert self.pooler is not None, "this top has no pooler"
        return torch.tanh(self.pooler(x_RD))


class OutputProjection(NamedTuple):
    """The parts of a model that its heads use."""

    weight_vD: Matrix
    """This rank's rows of the output projection."""
    axes: Axes
    vocab_size: int
    """V, over all ranks."""
    bert: BertLayers | None = None
    """The layers above an encoder."""
    kernels: str = "auto"
    """The implementation of the product (:mod:`~colonnade.kernels.registry`)."""
    scale: float = 1.0
    """Factor of the hidden state before the product (:attr:`ModelConfig.scale_decoder_outputs`)."""


class Head(Protocol):
    """Turns the last residual stream into the result."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Any:
        """The result of the forward pass over T tokens; ``x_tD`` has the rows ``axes.rows(T)``."""
        ...


@dataclass(frozen=True)
class Rows:
    """Logits of the tokens ``index_R`` of the stream (None: all), over the whole vocabulary, on every rank."""

    index_R: Tensor | None = None

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """logits_RV."""
        return output.axes.tp.join(local_logits(x_tD, T, self.index_R, output), 1, output.vocab_size)


@dataclass(frozen=True)
class LocalVocabRows:
    """As :class:`Rows`, with each rank's share of the vocabulary only."""

    index_R: Tensor | None = None

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """logits_Rv."""
        return local_logits(x_tD, T, self.index_R, output)


@dataclass(frozen=True)
class Loss:
    """The summed cross-entropy against ``targets_R`` (:data:`IGNORE` for none), and the number of targets.

    ``rows_R``: the tokens of the stream that the targets belong to (None: all, in order).
    """

    targets_R: Tensor
    smoothing: float = 0.0
    rows_R: Tensor | None = None

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of valid targets), the same on all tp ranks.

        The caller takes the mean, because it is over data ranks and micro-batches too.
        """
        x_RD, bias_v = projection_input(x_tD, T, self.rows_R, output)
        weight_vD = output.weight_vD
        total = cross_entropy_sum(
            x_RD,
            dequantise(weight_vD, x_RD.dtype) if isinstance(weight_vD, Quantised) else weight_vD,
            self.targets_R,
            tp=output.axes.tp,
            vocab_size=output.vocab_size,
            smoothing=self.smoothing,
            bias_v=bias_v,
        )
        return total, (self.targets_R != IGNORE).sum()


def local_logits(x_tD: Tensor, T: int, rows_R: Tensor | None, output: OutputProjection) -> Tensor:
    """logits_Rv of the tokens ``rows_R`` (None: all), over this rank's share of the vocabulary."""
    x_RD, bias_v = projection_input(x_tD, T, rows_R, output)
    return project_rows(x_RD, bias_v, output)


def project_rows(x_RD: Tensor, bias_v: Tensor | None, output: OutputProjection) -> Tensor:
    """logits_Rv of :func:`projection_input`'s result, or of some rows of it."""
    return linear(x_RD, output.weight_vD, bias_v, output.kernels)


def projection_input(
    x_tD: Tensor, T: int, rows_R: Tensor | None, output: OutputProjection
) -> tuple[Tensor, Tensor | None]:
    """x_RD for the column-parallel output projection, and this rank's part of its bias."""
    axes, bert = output.axes, output.bert
    if bert is None:
        x_TD = axes.enter_tp_region(x_tD if output.scale == 1.0 else x_tD * output.scale, T)
        return (x_TD if rows_R is None else x_TD[rows_R]), None
    x_TD = axes.all_tokens(x_tD, T)
    return axes.tp.fan_out(bert.transform_masked(x_TD if rows_R is None else x_TD[rows_R])), bert.bias


@dataclass(frozen=True)
class Hidden:
    """The last residual stream, of any model."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """x_TD."""
        return output.axes.all_tokens(x_tD, T)


@dataclass(frozen=True)
class Pooled:
    """The pooled vector of each sequence (a model with a pooler)."""

    first_R: Tensor

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """p_RD, between -1 and 1."""
        assert output.bert is not None, "a causal model has no pooler"
        return output.bert.pooled(output.axes.all_tokens(x_tD, T)[self.first_R])


@dataclass(frozen=True)
class Classes:
    """A classifier's logits of each sequence (``task_head = classes``)."""

    first_R: Tensor

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """logits_RC."""
        return class_logits(Pooled(self.first_R)(x_tD, T, output), output)


@dataclass(frozen=True)
class ClassLoss:
    """The summed cross-entropy of a classifier, and the number of labels (``task_head = classes``)."""

    first_R: Tensor
    labels_R: Tensor
    """The class of each sequence, or IGNORE."""
    smoothing: float = 0.0
    dropout: BlockDropout | None = None
    """Dropout of the pooled vectors, as in BERT's fine-tuning; its rows are the first tokens."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of labels) on all tp ranks; in float32, or float64 for a float64 model."""
        logits_RC = self.logits(Pooled(self.first_R)(x_tD, T, output), output)
        return _summed_cross_entropy(logits_RC, self.labels_R, self.smoothing)

    def logits(self, pooled_RD: Tensor, output: OutputProjection) -> Tensor:
        """logits_RC of the pooled vectors, after dropout."""
        return _dropped_class_logits(pooled_RD, self.dropout, output)


@dataclass(frozen=True)
class Spans:
    """Logits of each token as the first, and as the last token of an answer (``task_head = spans``)."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """logits_T2."""
        assert output.bert is not None, "a causal model has no span layer"
        assert output.bert.spans is not None, "this model has no span layer"
        return output.bert.spans(output.axes.all_tokens(x_tD, T))


@dataclass(frozen=True)
class ChoiceLoss:
    """The summed cross-entropy of choosing one of several sequences, by one logit each (``classes = 1``)."""

    first_R: Tensor
    """First tokens of all sequences; consecutive ones are the choices of one question."""
    choices: int
    """Sequences of a question."""
    labels_Q: Tensor
    """The right choice of each question, or IGNORE."""
    smoothing: float = 0.0
    dropout: BlockDropout | None = None
    """Dropout of the pooled vectors; its rows are the first tokens."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of labels) on all tp ranks."""
        logits_R1 = _dropped_class_logits(Pooled(self.first_R)(x_tD, T, output), self.dropout, output)
        return _summed_cross_entropy(logits_R1.reshape(-1, self.choices), self.labels_Q, self.smoothing)


@dataclass(frozen=True)
class SpanLoss:
    """The summed cross-entropies of an answer's first and last token over the tokens of its sequence."""

    cu_seqlens: Tensor
    longest: int
    first_R: Tensor
    """First token of each sequence with a target."""
    spans_R2: Tensor
    """First and last token of the answer, counted from the sequence's first token, or IGNORE."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(sum of the losses, two for each answer; number of targets) on all tp ranks."""
        logits_T2 = Spans()(x_tD, T, output)
        logits_T2 = logits_T2.to(torch.promote_types(logits_T2.dtype, torch.float32))
        logits_R2S = sequence_logits(logits_T2, self.cu_seqlens, self.longest, self.first_R)
        total = F.cross_entropy(logits_R2S.flatten(0, 1), self.spans_R2.flatten(), reduction="sum", ignore_index=IGNORE)
        return total, (self.spans_R2 != IGNORE).sum()


def sequence_logits(logits_T2: Tensor, cu_seqlens: Tensor, longest: int, first_R: Tensor) -> Tensor:
    """logits_R2S of each sequence's tokens, padded with the lowest number, whose exponential is 0."""
    stop_R = cu_seqlens[torch.searchsorted(cu_seqlens, first_R.to(cu_seqlens.dtype), right=True)]
    index_RS = first_R[:, None] + torch.arange(longest, device=first_R.device)
    padded_R1S = (index_RS >= stop_R[:, None])[:, None]
    logits_R2S = logits_T2[index_RS.clamp(max=len(logits_T2) - 1)].transpose(1, 2)
    return logits_R2S.masked_fill(padded_R1S, torch.finfo(logits_T2.dtype).min)


@dataclass(frozen=True)
class SentenceOrders:
    """Logits of (in order, swapped) for each pair of segments (``task_head = pretraining``)."""

    first_R: Tensor

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """logits_R2."""
        assert output.bert is not None, "a causal model does not predict the order of sentences"
        assert output.bert.order is not None, "this model does not predict the order of sentences"
        return output.bert.order(output.bert.pooled(output.axes.all_tokens(x_tD, T)[self.first_R]))


@dataclass(frozen=True)
class Pretraining:
    """BERT's two losses in one pass: masked tokens and sentence order."""

    masked: Loss
    orders: SentenceOrders
    orders_R: Tensor
    """0 in order, 1 swapped, IGNORE for a sequence that is not a pair."""
    weight: Tensor | float = 1.0
    """The weight of a pair's loss relative to a token's."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(sum over the masked tokens + weight · sum over the pairs, number of masked tokens) on all tp ranks."""
        masked, count = self.masked(x_tD, T, output)
        logits_R2 = self.orders(x_tD, T, output).to(masked.dtype)
        order = F.cross_entropy(logits_R2, self.orders_R, ignore_index=IGNORE, reduction="sum")
        weight = self.weight.to(masked.dtype) if isinstance(self.weight, Tensor) else self.weight
        return masked + weight * order, count


def _dropped_class_logits(pooled_RD: Tensor, dropout: BlockDropout | None, output: OutputProjection) -> Tensor:
    """logits_RC of the pooled vectors after dropout."""
    if dropout is not None:
        pooled_RD = dropout.drop(pooled_RD, POOLED, dropout.rates.residual)
    return class_logits(pooled_RD, output)


def _summed_cross_entropy(logits_RC: Tensor, labels_R: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """(sum of the losses in at least float32, number of labels)."""
    logits_RC = logits_RC.to(torch.promote_types(logits_RC.dtype, torch.float32))
    total = F.cross_entropy(logits_RC, labels_R, reduction="sum", ignore_index=IGNORE, label_smoothing=smoothing)
    return total, (labels_R != IGNORE).sum()


def class_logits(pooled_RD: Tensor, output: OutputProjection) -> Tensor:
    """logits_RC of pooled vectors."""
    assert output.bert is not None, "a causal model has no classifier"
    assert output.bert.classes is not None, "this model has no classifier"
    return output.bert.classes(pooled_RD)
