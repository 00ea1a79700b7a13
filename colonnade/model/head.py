"""What comes out of a forward pass: some rows of logits, or the loss. Passed in, like ``attend``."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from colonnade.kernels.linear.quantise import Quantised, dequantise
from colonnade.model.bert_heads import BertLayers
from colonnade.model.linear import Matrix, linear
from colonnade.model.loss import IGNORE, cross_entropy_sum
from colonnade.parallel.axis import Axes


class Projection(NamedTuple):
    """What a model has for its heads, whatever the tokens."""

    weight_vD: Matrix
    """This rank's rows of the output projection."""
    axes: Axes
    vocab_size: int
    """V, over all ranks."""
    top: BertLayers | None = None
    """An encoder's."""
    kernels: str = "auto"
    """Which implementation multiplies."""


class Head(Protocol):
    """Turns the last residual stream into the result."""

    def __call__(self, x_tD: Tensor, T: int, onto: Projection) -> Any:
        """The result of the forward pass over T tokens, of which ``x_tD`` holds the rows ``axes.rows(T)``."""
        ...


@dataclass(frozen=True)
class Rows:
    """Logits of the tokens ``index_R`` of the stream (all of them when None), whole vocabulary, on every rank."""

    index_R: Tensor | None = None

    def __call__(self, x_tD: Tensor, T: int, onto: Projection) -> Tensor:
        """logits_RV."""
        return onto.axes.tp.join(shares(x_tD, T, self.index_R, onto), 1, onto.vocab_size)


@dataclass(frozen=True)
class Shares:
    """As :class:`Rows`, but of each rank its share of the vocabulary alone."""

    index_R: Tensor | None = None

    def __call__(self, x_tD: Tensor, T: int, onto: Projection) -> Tensor:
        """logits_Rv."""
        return shares(x_tD, T, self.index_R, onto)


@dataclass(frozen=True)
class Loss:
    """The summed cross-entropy against ``targets_R`` (:data:`IGNORE` where there is none), and their number.

    ``rows_R`` says to which tokens of the stream the targets belong: to all of them, in order, when it is None.
    """

    targets_R: Tensor
    smoothing: float = 0.0
    rows_R: Tensor | None = None

    def __call__(self, x_tD: Tensor, T: int, onto: Projection) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of valid targets), the same on all tp ranks; the mean is the caller's affair,
        because it is taken over data ranks and micro-batches too.
        """
        x_RD, bias_v = _ready(x_tD, T, self.rows_R, onto)
        weight_vD = onto.weight_vD
        total = cross_entropy_sum(
            x_RD,
            dequantise(weight_vD, x_RD.dtype) if isinstance(weight_vD, Quantised) else weight_vD,
            self.targets_R,
            tp=onto.axes.tp,
            vocab_size=onto.vocab_size,
            smoothing=self.smoothing,
            bias_v=bias_v,
        )
        return total, (self.targets_R != IGNORE).sum()


def shares(x_tD: Tensor, T: int, rows_R: Tensor | None, onto: Projection) -> Tensor:
    """logits_Rv: this rank's share of the vocabulary, of the tokens ``rows_R`` of the stream (None: of all)."""
    x_RD, bias_v = _ready(x_tD, T, rows_R, onto)
    return linear(x_RD, onto.weight_vD, bias_v, onto.kernels)


def _ready(x_tD: Tensor, T: int, rows_R: Tensor | None, onto: Projection) -> tuple[Tensor, Tensor | None]:
    """x_RD as the ranks enter the output projection, and this rank's part of its bias."""
    axes, top = onto.axes, onto.top
    if top is None:
        x_TD = axes.enter_tp_region(x_tD, T)
        return (x_TD if rows_R is None else x_TD[rows_R]), None
    x_TD = axes.all_tokens(x_tD, T)
    return axes.tp.fan_out(top.transformed(x_TD if rows_R is None else x_TD[rows_R])), top.bias
