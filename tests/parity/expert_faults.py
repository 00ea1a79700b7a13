"""Faults that expert-parallel layers have had, to be put into ours: what ``colonnade verify`` must find."""

import pytest
import torch
from torch import Tensor

from colonnade.kernels.dropout import HiddenDropout, hidden_hash
from colonnade.kernels.experts.reference import Weights
from colonnade.model import Transformer, transformer
from colonnade.model.moe import dispatch, experts, layer, losses
from colonnade.model.moe import experts as dropout
from colonnade.parallel.axis import SOLO, Axis, Grid
from colonnade.parallel.layout import Experts
from colonnade.train import grad_norm, moe_stats, train_step
from colonnade.train.pipeline_step import PipelineStep

Patch = pytest.MonkeyPatch


def copies_not_summed(patch: Patch) -> None:
    """Ranks that hold the same experts keep the gradients of their own tokens."""
    patch.setattr(grad_norm, "sum_experts", lambda *_: None)


def output_bias_of_own_tokens(patch: Patch) -> None:
    """An output's bias, which each rank of an expert has whole, gets the gradient of some tokens only."""
    right = grad_norm.sum_experts
    patch.setattr(grad_norm, "sum_experts", lambda w, layout, grid: right(w, layout, Grid(copies=grid.copies)))


def copies_counted(patch: Patch) -> None:
    """The norm counts every copy of an expert."""
    right = grad_norm._owns
    patch.setattr(grad_norm, "_owns", lambda at, axes: isinstance(at, Experts) or right(at, axes))


def every_slice_adds_the_bias(patch: Patch) -> None:
    """Each of the r ranks of a token adds the output's bias to its partial result."""

    right = experts.Experts._slice

    def slice_(
        self: experts.Experts, x_RD: Tensor, order_R: Tensor, ends_e: Tensor, axis: Axis, first: bool,
        dropout: HiddenDropout | None,
    ) -> Tensor:  # fmt: skip
        return right(self, x_RD, order_R, ends_e, axis, True, dropout)

    patch.setattr(experts.Experts, "_slice", slice_)


def hidden_units_by_their_place_here(patch: Patch) -> None:
    """A rank that has the second half of an expert's hidden units drops those that the first half would."""

    def hidden(self: dropout.ExpertDropout, tag_R: Tensor, width: int, grid: Grid, degree: int = 1) -> HiddenDropout:
        return HiddenDropout(tag_R, hidden_hash(torch.arange(width // degree)), self.rate)

    patch.setattr(dropout.ExpertDropout, "hidden", hidden)


def own_tokens_balanced(patch: Patch) -> None:
    """The balance loss counts the load of this rank's tokens only."""
    right = losses.losses
    patch.setattr(layer, "losses", lambda *rest: right(*rest[:4], SOLO, *rest[5:]))


def own_tokens_pooled(patch: Patch) -> None:
    """The balance loss over all layers counts this rank's tokens only."""
    right = losses.attach_pooled
    patch.setattr(transformer, "attach_pooled", lambda *rest: right(*rest[:4], SOLO))


def own_stage_pooled(patch: Patch) -> None:
    """It counts the layers of the last pipeline stage only."""
    right = PipelineStep._run

    def run(self: PipelineStep, span: range, sent: tuple[Tensor, ...], i: int) -> tuple[Tensor, ...] | Tensor:
        return right(self, span, (*sent[:1], *(0 * sums for sums in sent[1:])), i)

    patch.setattr(PipelineStep, "_run", run)


def bias_by_own_load(patch: Patch) -> None:
    """The balancing bias moves by a load that is not that of all ranks."""
    right = train_step.rebalance

    def rebalance(model: Transformer, found: moe_stats.Routed, skip: Tensor) -> None:
        alone = model.axes.grid.tokens.size == 1
        right(model, found if alone else found._replace(load_LE=found.load_LE.flip(1)), skip)

    patch.setattr(train_step, "rebalance", rebalance)


def shadows_keep_their_gradient(patch: Patch) -> None:
    """The owner of a shadowed expert does not hear of the tokens that stayed where they were."""

    def gathered(x_tD, shadow_tA, weights_tA, experts, grid, hot_E, dropout):
        weights_tA = weights_tA * (shadow_tA < len(hot_E))
        held = Weights(*(None if w is None else w.detach() for w in experts.shadows(hot_E, grid)))
        return dispatch._here(x_tD, shadow_tA, weights_tA, experts, held, grid, None, dropout)

    patch.setattr(dispatch, "_shadowed", gathered)


def rows_in_the_order_of_arrival(patch: Patch) -> None:
    """Rows that come in are taken for sorted by expert, as one sender's are."""
    patch.setattr(dispatch, "_by_expert", lambda count_pse, rows: _counted(count_pse.sum((1, 2))))


def _counted(rows_p: Tensor) -> Tensor:
    """0, 1, … of each part."""
    return torch.cat([torch.arange(n) for n in rows_p.tolist()])
