"""A layer of experts: Router, Dispatch, Experts, Combine, beside the experts that everybody shares.

    y = Σ_j w_j · expert_{i_j}(x) + shared(x)

A dense feed-forward part is one expert; capacity and droplessness differ in Dispatch only (GShard, arXiv 2006.16668;
MegaBlocks, arXiv 2211.15841).
"""

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig, MoeConfig
from colonnade.model.dropout import BlockDropout
from colonnade.model.ffn import FeedForward
from colonnade.model.linear import Linear
from colonnade.model.moe.capacity import apply_capacity
from colonnade.model.moe.dispatch import run_experts, where_all_are
from colonnade.model.moe.experts import ExpertDropout, Experts
from colonnade.model.moe.losses import balance_losses, expert_load, layer_sums
from colonnade.model.moe.router import Router
from colonnade.model.moe.routing_context import DispatchOptions, LayerReport, LayerRouting, attach
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import Placement, on_rows


class MixtureOfExperts(nn.Module):
    """x_tD to y_tD, and a report of what went where."""

    def __init__(
        self,
        config: ModelConfig,
        moe: MoeConfig,
        axes: Axes,
        *,
        device: torch.device,
        dtype: torch.dtype,
        experts_on: torch.device | None = None,
    ):
        """``experts_on``: where the experts that a router chooses are stored, if not on ``device``."""
        super().__init__()
        self.moe, self.axes = moe, axes
        on = {"device": device, "dtype": dtype}
        self.router = Router(config, moe, axes, **on)
        self.experts = Experts(config, moe, axes, **on, storage_device=experts_on)
        self.shared = FeedForward(config, axes, width=moe.shared_width, **on) if moe.shared_width else None
        self.shared_gate = Linear(config.width, 1, bias=False, **on) if moe.shared_gate else None
        if self.shared_gate is not None:
            self.shared_gate.never_quantise = True
        self.layout: dict[str, Placement] = {"shared_gate.weight": on_rows(axes)} if moe.shared_gate else {}

    def forward(
        self, x_tD: Tensor, T: int, routed: LayerRouting, noise: BlockDropout | None = None
    ) -> tuple[Tensor, LayerReport]:
        """y_tD of the residual stream of T tokens; ``noise`` is of the rows at hand, as ``x_tD``."""
        routing = routed.routing
        own = slice(*self.axes.same.part(T))  # these tokens are this rank's, whoever else has their rows
        own_tD, tokens_t = self.axes.apart(x_tD), routed.tokens_T[own]
        index_t = torch.arange(own.start, own.stop, device=x_tD.device) if routing is None else routing.index_T[own]
        if noise is not None and not self.axes.sequence_parallel:
            noise = noise.rows(own)
        moe = self.moe if routing is None or routing.moe is None else routing.moe
        training = routing is not None and routing.weight is not None
        units = None if routing is None or routing.units is None else routing.units.rows(own)
        gate = 0 if routing is None else routing.gate
        choice, logits_tE = self.router(own_tD, tokens_t, index_t, noise, gate, training=training, units=units, moe=moe)
        load_E = expert_load(choice.ids_TA, moe.experts)
        admitted = apply_capacity(choice, index_t, moe, self.axes.grid.tokens)
        step = routed.step or DispatchOptions(degree=self.axes.grid.sh.size)
        dropout = ExpertDropout.of(noise, admitted.ids_TA.shape[1])
        # Where all ranks hold the same tokens each may do its experts' part of all of them.
        summed = self.axes.alike and self.axes.grid.all.size > 1
        if summed:
            ids_TA, weights_TA = self.axes.rejoin(admitted.ids_TA, T), self.axes.rejoin(admitted.weights_TA, T)
            out_tD, sent_bytes = where_all_are(x_tD, ids_TA, weights_TA, self.experts, self.axes.grid)
        else:
            out_tD, sent_bytes = run_experts(
                own_tD, admitted.ids_TA, admitted.weights_TA, self.experts, self.axes.grid, step, choice.rows, dropout
            )
        zero = out_tD.new_zeros(())
        if admitted.ids_TA is choice.ids_TA:
            dropped = torch.zeros((), dtype=torch.int64, device=x_tD.device)
        else:
            dropped = (admitted.ids_TA != choice.ids_TA).sum()
        sent = torch.full((), sent_bytes, device=x_tD.device)  # no copy from the host, which would wait
        finite = zero == 0 if logits_tE is None or not len(logits_tE) else _all_finite(logits_tE.detach())
        report = LayerReport(load_E, zero, zero, dropped, sent, finite)
        if routing is not None and routing.weight is not None:
            surrogate, balance, z = balance_losses(choice, load_E, logits_tE, moe, self.axes.grid.tokens, units)
            out_tD = attach(out_tD, surrogate, routing.weight)
            pooled = layer_sums(choice, load_E) if moe.pools_layers else None
            report = report._replace(balance=balance, z=z, pool=pooled)
        if moe.dropped == "residual":
            lost_t1 = (choice.weights_TA * (admitted.ids_TA == moe.experts)).sum(1, keepdim=True)
            lost_tD = x_tD * self.axes.rejoin(lost_t1, T) if summed else own_tD * lost_t1
            out_tD = out_tD + lost_tD.to(out_tD.dtype)
        y_tD = out_tD if summed else self.axes.rejoin(out_tD, T)
        if self.shared is not None:
            shared_tD = self.shared(x_tD, T)
            y_tD = y_tD + (shared_tD if self.shared_gate is None else self.shared_gate(x_tD).sigmoid() * shared_tD)
        return y_tD, report


def _all_finite(logits_tE: Tensor) -> Tensor:
    """Whether all are, in one pass: the largest in size is below infinity, which it is not where there is a NaN."""
    return torch.linalg.vector_norm(logits_tE, float("inf")) < float("inf")
