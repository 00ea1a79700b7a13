"""What comes out of an encoder: hidden states, a pooled vector, classes, spans, or BERT's two losses.

A sequence is known by its first token, [CLS]: ``first_R`` holds where each of R sequences begins in the stream.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from colonnade.model.head import Loss
from colonnade.model.loss import IGNORE
from colonnade.model.top import Top
from colonnade.parallel.axis import Axes


@dataclass(frozen=True)
class Hidden:
    """The last residual stream itself, of any model."""

    def __call__(
        self, x_tD: Tensor, T: int, weight_vD: Tensor, axes: Axes, vocab_size: int, top: Top | None = None
    ) -> Tensor:
        """x_TD."""
        return axes.together(x_tD, T)


@dataclass(frozen=True)
class Pooled:
    """The pooled vector of each sequence (a model with a pooler)."""

    first_R: Tensor

    def __call__(
        self, x_tD: Tensor, T: int, weight_vD: Tensor, axes: Axes, vocab_size: int, top: Top | None = None
    ) -> Tensor:
        """p_RD, between -1 and 1."""
        assert top is not None, "a causal model has no pooler"
        return top.pooled(axes.together(x_tD, T)[self.first_R])


@dataclass(frozen=True)
class Classes:
    """A classifier's logits of each sequence (``top = classes``)."""

    first_R: Tensor

    def __call__(
        self, x_tD: Tensor, T: int, weight_vD: Tensor, axes: Axes, vocab_size: int, top: Top | None = None
    ) -> Tensor:
        """logits_RC."""
        assert top is not None, "a causal model has no classifier"
        assert top.classes is not None, "this model has no classifier"
        return top.classes(top.pooled(axes.together(x_tD, T)[self.first_R]))


@dataclass(frozen=True)
class Spans:
    """For each token, how likely it is an answer's first, and its last (``top = spans``)."""

    def __call__(
        self, x_tD: Tensor, T: int, weight_vD: Tensor, axes: Axes, vocab_size: int, top: Top | None = None
    ) -> Tensor:
        """logits_T2."""
        assert top is not None, "a causal model has no span layer"
        assert top.spans is not None, "this model has no span layer"
        return top.spans(axes.together(x_tD, T))


@dataclass(frozen=True)
class Orders:
    """Logits of (in order, swapped) for each pair of segments (``top = pretraining``)."""

    first_R: Tensor

    def __call__(
        self, x_tD: Tensor, T: int, weight_vD: Tensor, axes: Axes, vocab_size: int, top: Top | None = None
    ) -> Tensor:
        """logits_R2."""
        assert top is not None, "a causal model does not predict the order of sentences"
        assert top.order is not None, "this model does not predict the order of sentences"
        return top.order(top.pooled(axes.together(x_tD, T)[self.first_R]))


@dataclass(frozen=True)
class Pretraining:
    """BERT's two losses in one pass: the masked tokens', and that of the segments' order."""

    masked: Loss
    orders: Orders
    orders_R: Tensor
    """0 in order, 1 swapped, IGNORE for a sequence that is no pair."""
    weight: Tensor | float = 1.0
    """Of a pair's loss beside a token's."""

    def __call__(
        self, x_tD: Tensor, T: int, weight_vD: Tensor, axes: Axes, vocab_size: int, top: Top | None = None
    ) -> tuple[Tensor, Tensor]:
        """(sum over the masked tokens + weight · sum over the pairs, number of masked tokens) on all tp ranks."""
        masked, count = self.masked(x_tD, T, weight_vD, axes, vocab_size, top)
        logits_R2 = self.orders(x_tD, T, weight_vD, axes, vocab_size, top).to(masked.dtype)
        order = F.cross_entropy(logits_R2, self.orders_R, ignore_index=IGNORE, reduction="sum")
        return masked + self.weight * order, count
