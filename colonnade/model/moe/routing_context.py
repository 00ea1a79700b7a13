"""What a forward pass says to its layers of experts, and what they say of themselves."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.config import MoeConfig
from colonnade.config.model import divisors
from colonnade.errors import PlanError
from colonnade.parallel.axis import Axis


class Report(NamedTuple):
    """What one layer did; all on the device. The losses are the same on all ranks."""

    load_E: Tensor
    """int64: choices of this rank's tokens by expert, dropped ones included."""
    balance: Tensor
    """The balance loss, a mean over all ranks' tokens; 0 where it is taken over all layers together."""
    z: Tensor
    """The router z-loss, likewise."""
    dropped: Tensor
    """Choices of this rank's tokens that got no place."""
    sent_bytes: Tensor
    """What this rank handed to others for its forward pass: tokens there and back, and weights."""
    finite: Tensor
    """bool: whether all scores of this rank's tokens are finite."""
    pool: Tensor | None = None
    """This layer's sums for a balance loss over all layers (:func:`colonnade.model.moe.losses.pool`)."""


@dataclass
class Pooled:
    """The balance loss over all layers of one forward pass (``model.moe.balance_over`` "model")."""

    sums: Tensor | None = None
    """The layers' pools so far, added up, those of earlier pipeline stages included."""
    balance: Tensor | None = None
    """The loss over all ranks, once the last layer has run here."""

    def take(self) -> Tensor:
        """The sums, which are not kept: their graph would outlive the backward pass."""
        assert self.sums is not None, "no layer of experts has run"
        sums, self.sums = self.sums, None
        return sums


def blame(by_rank: list[list[bool]]) -> str | None:
    """Which layer's routers, and on which ranks, were the first to have scores that are not finite; None for none.

    ``by_rank`` says for each rank, and layer, whether they are. Nobody need ask before a step was found to be bad: such
    scores make its gradient not finite, and it then moves nothing.
    """
    for layer in range(min(map(len, by_rank), default=0)):
        ranks = [str(rank) for rank, finite in enumerate(by_rank) if not finite[layer]]
        if ranks:
            return f"the router's scores in layer {layer} are not finite on rank {', '.join(ranks)} of {len(by_rank)}"
    return None


@dataclass(frozen=True)
class Spread:
    """How a layer spreads its work in this step; what is stored where does not change with it."""

    degree: int = 1
    """r: 0 gathers all experts on every rank; r ≥ 1, a divisor of sh, hands each token to r ranks of its expert."""
    overlap: int = 1
    """p: parts in which tokens travel, each while the experts compute the one before."""
    shadows: int = 0
    """The experts of the highest load, of which every rank gathers the weights for its own tokens (r ≥ 1)."""

    def check(self, sh: int, experts: int) -> None:
        """Raise :class:`PlanError` for what a layer of so many experts, each on ``sh`` ranks, cannot do; on all ranks
        alike, before any of them sends anything.
        """
        if self.degree < 0 or (self.degree and sh % self.degree):
            raise PlanError(
                f"a step's degree {self.degree} does not divide the sh={sh} ranks of an expert; use 0 or one of "
                f"{divisors(sh)}"
            )
        if self.overlap < 1:
            raise PlanError(f"tokens cannot travel in {self.overlap} parts; a step's overlap is 1 or more")
        if not 0 <= self.shadows <= experts:
            raise PlanError(f"{self.shadows} of {experts} experts cannot be shadowed; use 0 to {experts}")


class Units(NamedTuple):
    """What decides, or is balanced, as one: the sequences of a step, or the tasks that a text may be of."""

    of_T: Tensor
    """int64: the number of each token's own, the same for its tokens on other ranks."""
    count: int
    """Numbers are below it."""

    @staticmethod
    def sequences(cu_seqlens: Tensor, T: int, over: Axis) -> "Units":
        """The sequences of a micro-batch of T tokens, numbered on through the ranks ``over`` that have others."""
        each = len(cu_seqlens) - 1
        row_T = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        of_T = torch.searchsorted(cu_seqlens[1:].contiguous(), row_T, right=True)
        counts = over.all_gather_int(each)
        return Units(of_T + sum(counts[: over.rank]), sum(counts))

    def rows(self, part: slice | Tensor) -> "Units":
        """Of some of the tokens."""
        return self._replace(of_T=self.of_T[part])

    def sum_(self, x: Tensor) -> Tensor:
        """The sum of the rows of ``x`` by unit, over this rank's tokens."""
        return x.new_zeros(self.count, x.shape[1]).index_add(0, self.of_T, x)


@dataclass(frozen=True)
class Routing:
    """What concerns the routers of one forward pass. None in a stream: inference, by gate 0."""

    index_T: Tensor
    """int64: each token's number in the step's global batch; orders tokens of different ranks."""
    weight: Tensor | float | None = None
    """What a unit of each layer's loss sum counts in the gradient; None: no losses, no noise of the router's own."""
    gate: int = 0
    """Which of each layer's gates decides."""
    units: Units | None = None
    """Which tokens are of one sequence, or of one task, for routers and losses that ask."""
    steps: Sequence[Spread] = (Spread(),)
    """How each layer with experts spreads its work: one for all of them, or one each by block number."""
    moe: MoeConfig | None = None
    """What the layers decide by, where it is not what they were built with: another A, or another capacity."""
    reports: dict[int, Report] = field(default_factory=dict)
    """Filled by the forward pass: each layer's report, by block number."""
    pooled: Pooled = field(default_factory=Pooled)
    """Likewise: what is summed over the layers."""

    def note(self, layer: int, report: Report) -> None:
        """Keep the report of block ``layer``, and add its pool to the others."""
        if report.pool is not None:
            sums = self.pooled.sums
            self.pooled.sums = report.pool if sums is None else sums + report.pool
        self.reports[layer] = report._replace(pool=None)

    def rows(self, part: slice | Tensor) -> "Routing":
        """The same for some of the tokens; reports go to the same place."""
        return replace(self, index_T=self.index_T[part], units=self.units and self.units.rows(part))

    def step(self, layer: int) -> Spread:
        """How block ``layer`` spreads its work."""
        return self.steps[layer] if len(self.steps) > 1 else self.steps[0]


class Routed(NamedTuple):
    """What one layer of experts must know beside its input."""

    tokens_T: Tensor
    """The ids of the stream's tokens."""
    routing: Routing | None
    step: Spread | None
    """How it spreads its work; None: tokens travel and no weight does, which suits the few tokens of inference."""

    @staticmethod
    def at(layer: int, tokens_T: Tensor, routing: Routing | None) -> "Routed":
        """The view of block ``layer``."""
        return Routed(tokens_T, routing, routing and routing.step(layer))


class _Attach(Function):
    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (weight,) = ctx.saved_tensors
        return grad, weight.to(ctx.dtype), None


def attach(x: Tensor, loss: Tensor, weight: Tensor | float) -> Tensor:
    """``x``, whose backward pass adds the gradient of ``weight · loss``.

    So a layer's own loss needs no way to the end of the model, which may stand on another pipeline rank.
    """
    if not isinstance(weight, Tensor):
        weight = loss.new_full((), weight)  # torch would make it float32
    return _Attach.apply(x, loss, weight)
