"""What comes out of an encoder: hidden states, a pooled vector, classes, spans, or BERT's two losses.

A sequence is known by its first token, [CLS]: ``first_R`` holds where each of R sequences begins in the stream.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.model.dropout import POOLED, BlockDropout
from colonnade.model.head import Loss, Projection
from colonnade.model.loss import IGNORE


@dataclass(frozen=True)
class Hidden:
    """The last residual stream itself, of any model."""

    def __call__(self, x_tD: Tensor, T: int, onto: Projection) -> Tensor:
        """x_TD."""
        return onto.axes.all_tokens(x_tD, T)


@dataclass(frozen=True)
class Pooled:
    """The pooled vector of each sequence (a model with a pooler)."""

    first_R: Tensor

    def __call__(self, x_tD: Tensor, T: int, onto: Projection) -> Tensor:
        """p_RD, between -1 and 1."""
        assert onto.top is not None, "a causal model has no pooler"
        return onto.top.pooled(onto.axes.all_tokens(x_tD, T)[self.first_R])


@dataclass(frozen=True)
class Classes:
    """A classifier's logits of each sequence (``top = classes``)."""

    first_R: Tensor

    def __call__(self, x_tD: Tensor, T: int, onto: Projection) -> Tensor:
        """logits_RC."""
        return _classified(Pooled(self.first_R)(x_tD, T, onto), onto)


@dataclass(frozen=True)
class ClassLoss:
    """The summed cross-entropy of a classifier, and the number of labels (``top = classes``)."""

    first_R: Tensor
    labels_R: Tensor
    """The class of each sequence, or IGNORE."""
    smoothing: float = 0.0
    noise: BlockDropout | None = None
    """Of the first tokens: drops elements of the pooled vectors, as BERT's fine-tuning does."""

    def __call__(self, x_tD: Tensor, T: int, onto: Projection) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of labels) on all tp ranks; in float32, or float64 for a float64 model."""
        pooled_RD = Pooled(self.first_R)(x_tD, T, onto)
        if self.noise is not None:
            pooled_RD = self.noise.drop(pooled_RD, POOLED, self.noise.rates.residual)
        logits_RC = _classified(pooled_RD, onto)
        logits_RC = logits_RC.to(torch.promote_types(logits_RC.dtype, torch.float32))
        options = {"ignore_index": IGNORE, "label_smoothing": self.smoothing}
        total = F.cross_entropy(logits_RC, self.labels_R, reduction="sum", **options)
        return total, (self.labels_R != IGNORE).sum()


@dataclass(frozen=True)
class Spans:
    """For each token, how likely it is an answer's first, and its last (``top = spans``)."""

    def __call__(self, x_tD: Tensor, T: int, onto: Projection) -> Tensor:
        """logits_T2."""
        assert onto.top is not None, "a causal model has no span layer"
        assert onto.top.spans is not None, "this model has no span layer"
        return onto.top.spans(onto.axes.all_tokens(x_tD, T))


@dataclass(frozen=True)
class Orders:
    """Logits of (in order, swapped) for each pair of segments (``top = pretraining``)."""

    first_R: Tensor

    def __call__(self, x_tD: Tensor, T: int, onto: Projection) -> Tensor:
        """logits_R2."""
        assert onto.top is not None, "a causal model does not predict the order of sentences"
        assert onto.top.order is not None, "this model does not predict the order of sentences"
        return onto.top.order(onto.top.pooled(onto.axes.all_tokens(x_tD, T)[self.first_R]))


@dataclass(frozen=True)
class Pretraining:
    """BERT's two losses in one pass: the masked tokens', and that of the segments' order."""

    masked: Loss
    orders: Orders
    orders_R: Tensor
    """0 in order, 1 swapped, IGNORE for a sequence that is no pair."""
    weight: Tensor | float = 1.0
    """Of a pair's loss beside a token's."""

    def __call__(self, x_tD: Tensor, T: int, onto: Projection) -> tuple[Tensor, Tensor]:
        """(sum over the masked tokens + weight · sum over the pairs, number of masked tokens) on all tp ranks."""
        masked, count = self.masked(x_tD, T, onto)
        logits_R2 = self.orders(x_tD, T, onto).to(masked.dtype)
        order = F.cross_entropy(logits_R2, self.orders_R, ignore_index=IGNORE, reduction="sum")
        weight = self.weight.to(masked.dtype) if isinstance(self.weight, Tensor) else self.weight
        return masked + weight * order, count


def _classified(pooled_RD: Tensor, onto: Projection) -> Tensor:
    assert onto.top is not None, "a causal model has no classifier"
    assert onto.top.classes is not None, "this model has no classifier"
    return onto.top.classes(pooled_RD)
