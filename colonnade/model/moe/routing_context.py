"""Inputs of the mixture-of-experts layers of a forward pass, and the reports that they return."""

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


class LayerReport(NamedTuple):
    """Statistics of one layer, all on the device. The losses are the same on all ranks."""

    load_E: Tensor
    """int64: choices of this rank's tokens by expert, dropped ones included."""
    balance: Tensor
    """The balance loss, a mean over all ranks' tokens; 0 if it is taken over all layers together."""
    z: Tensor
    """The router z-loss, in the same form."""
    dropped: Tensor
    """Choices of this rank's tokens beyond the capacity."""
    sent_bytes: Tensor
    """Bytes that this rank handed to other ranks in the forward pass: tokens there and back, and weights."""
    finite: Tensor
    """bool: whether all scores of this rank's tokens are finite."""
    sums: Tensor | None = None
    """This layer's sums for a balance loss over all layers (:func:`colonnade.model.moe.losses.layer_sums`)."""


@dataclass
class ModelBalance:
    """The balance loss over all layers of one forward pass (``model.moe.balance_over`` "model")."""

    sums: Tensor | None = None
    """The layers' sums so far, added up, including those of earlier pipeline stages."""
    balance: Tensor | None = None
    """The loss over all ranks, set after the last layer."""

    def take(self) -> Tensor:
        """Return the sums and drop the reference: their graph would outlive the backward pass."""
        assert self.sums is not None, "no layer of experts has run"
        sums, self.sums = self.sums, None
        return sums


def find_nonfinite_scores(by_rank: list[list[bool]]) -> str | None:
    """Name the first layer whose router's scores are not finite, and its ranks; None if there is none.

    ``by_rank``: for each rank and layer, whether the scores are finite. Checked only after a step was skipped: scores
    that are not finite make the gradient not finite, and such a step updates nothing.
    """
    for layer in range(min(map(len, by_rank), default=0)):
        ranks = [str(rank) for rank, finite in enumerate(by_rank) if not finite[layer]]
        if ranks:
            return f"the router's scores in layer {layer} are not finite on rank {', '.join(ranks)} of {len(by_rank)}"
    return None


@dataclass(frozen=True)
class DispatchOptions:
    """How a layer distributes its work in this step; where weights are stored does not change."""

    adaptive_r: int = 1
    """r: 0 gathers all experts on every rank; r ≥ 1, a divisor of etp, sends each token to r ranks of its expert."""
    overlap: int = 1
    """p: parts in which tokens travel, each while the experts compute the one before."""
    shadows: int = 0
    """The most loaded experts, whose weights every rank gathers for its own tokens (r ≥ 1)."""

    def check(self, etp: int, experts: int) -> None:
        """Raise :class:`PlanError` for options that a layer of this many experts, each on ``etp`` ranks, does not
        support.

        All ranks raise it, before any communication.
        """
        if self.adaptive_r < 0 or (self.adaptive_r and etp % self.adaptive_r):
            raise PlanError(
                f"a step's adaptive_r {self.adaptive_r} does not divide the etp={etp} ranks of an expert; use "
                f"0 or one of "
                f"{divisors(etp)}"
            )
        if self.overlap < 1:
            raise PlanError(f"tokens cannot be sent in {self.overlap} parts; overlap must be 1 or more")
        if not 0 <= self.shadows <= experts:
            raise PlanError(f"{self.shadows} of {experts} experts cannot be shadowed; use 0 to {experts}")


class TokenGroups(NamedTuple):
    """Tokens that are routed, or balanced, as one: the sequences of a step, or the tasks of documents."""

    group_T: Tensor
    """int64: each token's group, the same number on all ranks."""
    count: int
    """Number of groups."""

    @staticmethod
    def sequences(cu_seqlens: Tensor, T: int, over: Axis) -> "TokenGroups":
        """The sequences of a micro-batch of T tokens, numbered consecutively across the ranks ``over``."""
        each = len(cu_seqlens) - 1
        row_T = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        group_T = torch.searchsorted(cu_seqlens[1:].contiguous(), row_T, right=True)
        counts = over.all_gather_int(each)
        return TokenGroups(group_T + sum(counts[: over.rank]), sum(counts))

    def rows(self, part: slice | Tensor) -> "TokenGroups":
        """The groups of some of the tokens."""
        return self._replace(group_T=self.group_T[part])

    def sum_by_group(self, x: Tensor) -> Tensor:
        """The sum of the rows of ``x`` by group, over this rank's tokens."""
        return x.new_zeros(self.count, x.shape[1]).index_add(0, self.group_T, x)


@dataclass(frozen=True)
class Routing:
    """The routing of one forward pass. None in a stream: inference with gate 0."""

    index_T: Tensor
    """int64: each token's index in the step's global batch; orders tokens across ranks."""
    weight: Tensor | float | None = None
    """The factor of each layer's loss sum in the gradient; None: no losses and no router noise."""
    gate: int = 0
    """Which of each layer's gates to use."""
    token_groups: TokenGroups | None = None
    """Which tokens are of one sequence, or of one task, for routers and losses that need it."""
    dispatch: Sequence[DispatchOptions] = (DispatchOptions(),)
    """How the layers distribute their work: one for all of them, or one each by block number."""
    moe: MoeConfig | None = None
    """Replaces the config that the layers were built with: another A, or another capacity."""
    reports: dict[int, LayerReport] = field(default_factory=dict)
    """Filled by the forward pass: each layer's report, by block number."""
    pooled: ModelBalance = field(default_factory=ModelBalance)
    """Filled by the forward pass: sums over the layers."""

    def record(self, layer: int, report: LayerReport) -> None:
        """Store the report of block ``layer``, and add its sums to those of the other layers."""
        if report.sums is not None:
            sums = self.pooled.sums
            self.pooled.sums = report.sums if sums is None else sums + report.sums
        self.reports[layer] = report._replace(sums=None)

    def rows(self, part: slice | Tensor) -> "Routing":
        """The routing of some of the tokens; reports go to the same dict."""
        groups = self.token_groups and self.token_groups.rows(part)
        return replace(self, index_T=self.index_T[part], token_groups=groups)


class LayerRouting(NamedTuple):
    """The routing of one layer."""

    tokens_T: Tensor
    """The ids of the stream's tokens."""
    routing: Routing | None
    dispatch: DispatchOptions | None
    """How to distribute the work; None: tokens travel and weights do not, which suits the few tokens of inference."""

    @staticmethod
    def at(layer: int, tokens_T: Tensor, routing: Routing | None) -> "LayerRouting":
        """The routing of block ``layer``."""
        if routing is None:
            return LayerRouting(tokens_T, None, None)
        return LayerRouting(tokens_T, routing, routing.dispatch[layer if len(routing.dispatch) > 1 else 0])


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
    """Return ``x`` with a backward pass that adds the gradient of ``weight · loss``.

    So a layer's own loss need not reach the end of the model, which may be on another pipeline rank.
    """
    if not isinstance(weight, Tensor):
        weight = loss.new_full((), weight)  # torch would make it float32
    return _Attach.apply(x, loss, weight)
