"""What comes out of a forward pass: some rows of logits, or the loss. Passed in, like ``attend``."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from colonnade.model.linear import linear
from colonnade.model.loss import IGNORE, cross_entropy_sum
from colonnade.parallel.axis import Axes


class Head(Protocol):
    """Turns the last residual stream into the result, given this rank's rows of the output projection."""

    def __call__(self, x_tD: Tensor, T: int, weight_vD: Tensor, axes: Axes, vocab_size: int) -> Any:
        """The result of the forward pass over T tokens, of which ``x_tD`` holds the rows ``axes.rows(T)``."""
        ...


@dataclass(frozen=True)
class Rows:
    """Logits of the tokens ``index_R`` of the stream (all of them when None), whole vocabulary, on every rank."""

    index_R: Tensor | None = None

    def __call__(self, x_tD: Tensor, T: int, weight_vD: Tensor, axes: Axes, vocab_size: int) -> Tensor:
        """logits_RV."""
        x_TD = axes.enter(x_tD, T)
        x_RD = x_TD if self.index_R is None else x_TD[self.index_R]
        return axes.tp.join(linear(x_RD, weight_vD), 1, vocab_size)


@dataclass(frozen=True)
class Loss:
    """The summed cross-entropy against ``targets_T`` (:data:`IGNORE` where there is none), and their number."""

    targets_T: Tensor
    smoothing: float = 0.0

    def __call__(self, x_tD: Tensor, T: int, weight_vD: Tensor, axes: Axes, vocab_size: int) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of valid targets), the same on all tp ranks; the mean is the caller's affair,
        because it is taken over data ranks and micro-batches too.
        """
        x_TD = axes.enter(x_tD, T)
        total = cross_entropy_sum(
            x_TD, weight_vD, self.targets_T, tp=axes.tp, vocab_size=vocab_size, smoothing=self.smoothing
        )
        return total, (self.targets_T != IGNORE).sum()
