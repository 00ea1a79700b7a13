"""Faults of expert parallelism, injected to check that ``colonnade verify`` finds them."""

import pytest
import torch
from torch import Tensor

from colonnade.kernels.dropout import HiddenDropout, hidden_hash
from colonnade.kernels.experts.reference import Weights
from colonnade.model import Transformer, transformer
from colonnade.model.moe import dispatch, experts, layer, losses
from colonnade.model.moe import experts as dropout
from colonnade.parallel.axis import SOLO, ExpertAxes
from colonnade.parallel.layout import Experts
from colonnade.train import moe_stats, optimizer_step, train_step
from colonnade.train.train_step import PipelineStep

Patch = pytest.MonkeyPatch


def copies_not_summed(patch: Patch) -> None:
    """Ranks that hold the same experts do not sum their gradients."""
    patch.setattr(optimizer_step, "sum_expert_grads", lambda *_: None)


def output_bias_of_own_tokens(patch: Patch) -> None:
    """The output bias, replicated on each rank of an expert, gets the gradient of only some tokens."""
    right = optimizer_step.sum_expert_grads
    patch.setattr(
        optimizer_step, "sum_expert_grads", lambda w, layout, grid: right(w, layout, ExpertAxes(copies=grid.copies))
    )


def copies_counted(patch: Patch) -> None:
    """The norm counts every copy of an expert."""
    right = optimizer_step._owns
    patch.setattr(optimizer_step, "_owns", lambda at, axes: isinstance(at, Experts) or right(at, axes))


def every_slice_adds_the_bias(patch: Patch) -> None:
    """Each of the r ranks of a token adds the output bias to its partial sum."""

    right = experts.Experts._compute

    def compute(self: experts.Experts, rows: experts.ExpertRows) -> Tensor:
        return right(self, rows._replace(output_bias=True))

    patch.setattr(experts.Experts, "_compute", compute)


def hidden_units_by_their_place_here(patch: Patch) -> None:
    """The rank with the second half of an expert's hidden units applies the dropout mask of the first half."""

    def hidden(
        self: dropout.ExpertDropout, tag_R: Tensor, width: int, grid: ExpertAxes, degree: int = 1
    ) -> HiddenDropout:
        return HiddenDropout(tag_R, hidden_hash(torch.arange(width // degree)), self.rate)

    patch.setattr(dropout.ExpertDropout, "hidden", hidden)


def own_tokens_balanced(patch: Patch) -> None:
    """The balance loss counts the load of this rank's tokens only."""
    right = losses.balance_losses
    patch.setattr(layer, "balance_losses", lambda *rest: right(*rest[:4], SOLO, *rest[5:]))


def own_tokens_pooled(patch: Patch) -> None:
    """The balance loss over all layers counts this rank's tokens only."""
    right = losses.attach_model_balance
    patch.setattr(transformer, "attach_model_balance", lambda *rest: right(*rest[:4], SOLO))


def own_stage_pooled(patch: Patch) -> None:
    """The balance loss over all layers counts those of the last pipeline stage only."""
    right = PipelineStep._run_stage

    def run(self: PipelineStep, span: range, sent: tuple[Tensor, ...], i: int) -> tuple[Tensor, ...] | Tensor:
        return right(self, span, (*sent[:1], *(0 * sums for sums in sent[1:])), i)

    patch.setattr(PipelineStep, "_run_stage", run)


def bias_by_own_load(patch: Patch) -> None:
    """The balancing bias is updated from a load that is not summed over all ranks."""
    right = train_step.update_router_biases

    def rebalance(model: Transformer, found: moe_stats.MoeStats, skip: Tensor) -> None:
        alone = model.axes.experts.tokens.size == 1
        right(model, found if alone else found._replace(load_LE=found.load_LE.flip(1)), skip)

    patch.setattr(train_step, "update_router_biases", rebalance)


def shadows_keep_their_gradient(patch: Patch) -> None:
    """The owner of a shadowed expert does not receive the gradients of tokens computed on other ranks."""
    right = experts.Experts.shadowed

    def shadowed(self: experts.Experts, hot_E: Tensor) -> Weights:
        return right(self, hot_E).map(Tensor.detach)

    patch.setattr(experts.Experts, "shadowed", shadowed)


def rows_in_the_order_of_arrival(patch: Patch) -> None:
    """Received rows are assumed to be sorted by expert, which holds only for a single sender."""
    patch.setattr(dispatch, "_by_expert", lambda count_pse, rows: _counted(count_pse.sum((1, 2))))


def _counted(rows_p: Tensor) -> Tensor:
    """The offset of each row within its part: 0, 1, …."""
    return torch.cat([torch.arange(n) for n in rows_p.tolist()])
