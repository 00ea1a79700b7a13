"""Heads: the result of a forward pass, logits of some rows or the loss; an argument, like ``attend``."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from colonnade.kernels.linear.quantise import Quantised, dequantise
from colonnade.model.bert_heads import BertLayers
from colonnade.model.linear import Matrix, linear
from colonnade.model.loss import IGNORE, cross_entropy_sum
from colonnade.parallel.axis import Axes


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


class Head(Protocol):
    """Turns the last residual stream into the result."""

    def __call__(self, x_tD: Tensor, T: int, output: OutputProjection) -> Any:
        """The result of the forward pass over T tokens, of which ``x_tD`` has the rows ``axes.rows(T)``."""
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
        x_TD = axes.enter_tp_region(x_tD, T)
        return (x_TD if rows_R is None else x_TD[rows_R]), None
    x_TD = axes.all_tokens(x_tD, T)
    return axes.tp.fan_out(bert.transform_masked(x_TD if rows_R is None else x_TD[rows_R])), bert.bias
