"""Heads of encoders: hidden states, a pooled vector, classes, spans, or BERT's two losses.

A sequence is represented by its first token, [CLS]: ``first_R`` is where each of R sequences starts in the stream.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.model.dropout import POOLED, BlockDropout
from colonnade.model.head import Loss, OutputProjection
from colonnade.model.loss import IGNORE


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
    """A classifier's logits of each sequence (``top = classes``)."""

    first_R: Tensor

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """logits_RC."""
        return _class_logits(Pooled(self.first_R)(x_tD, T, output), output)


@dataclass(frozen=True)
class ClassLoss:
    """The summed cross-entropy of a classifier, and the number of labels (``top = classes``)."""

    first_R: Tensor
    labels_R: Tensor
    """The class of each sequence, or IGNORE."""
    smoothing: float = 0.0
    dropout: BlockDropout | None = None
    """Dropout of the pooled vectors, as in BERT's fine-tuning; its rows are the first tokens."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of labels) on all tp ranks; in float32, or float64 for a float64 model."""
        pooled_RD = Pooled(self.first_R)(x_tD, T, output)
        if self.dropout is not None:
            pooled_RD = self.dropout.drop(pooled_RD, POOLED, self.dropout.rates.residual)
        logits_RC = _class_logits(pooled_RD, output)
        logits_RC = logits_RC.to(torch.promote_types(logits_RC.dtype, torch.float32))
        options = {"ignore_index": IGNORE, "label_smoothing": self.smoothing}
        total = F.cross_entropy(logits_RC, self.labels_R, reduction="sum", **options)
        return total, (self.labels_R != IGNORE).sum()


@dataclass(frozen=True)
class Spans:
    """Logits of each token as the first, and as the last token of an answer (``top = spans``)."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Tensor:
        """logits_T2."""
        assert output.bert is not None, "a causal model has no span layer"
        assert output.bert.spans is not None, "this model has no span layer"
        return output.bert.spans(output.axes.all_tokens(x_tD, T))


@dataclass(frozen=True)
class SentenceOrders:
    """Logits of (in order, swapped) for each pair of segments (``top = pretraining``)."""

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
    """0 in order, 1 swapped, IGNORE for a sequence that is no pair."""
    weight: Tensor | float = 1.0
    """The weight of a pair's loss relative to a token's."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> tuple[Tensor, Tensor]:
        """(sum over the masked tokens + weight · sum over the pairs, number of masked tokens) on all tp ranks."""
        masked, count = self.masked(x_tD, T, output)
        logits_R2 = self.orders(x_tD, T, output).to(masked.dtype)
        order = F.cross_entropy(logits_R2, self.orders_R, ignore_index=IGNORE, reduction="sum")
        weight = self.weight.to(masked.dtype) if isinstance(self.weight, Tensor) else self.weight
        return masked + weight * order, count


def _class_logits(pooled_RD: Tensor, output: OutputProjection) -> Tensor:
    assert output.bert is not None, "a causal model has no classifier"
    assert output.bert.classes is not None, "this model has no classifier"
    return output.bert.classes(pooled_RD)
