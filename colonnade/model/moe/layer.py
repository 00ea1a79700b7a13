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
from colonnade.model.moe.capacity import admit
from colonnade.model.moe.dispatch import through_experts, where_all_are
from colonnade.model.moe.experts import ExpertDropout, Experts
from colonnade.model.moe.losses import load, losses, pool
from colonnade.model.moe.router import Router
from colonnade.model.moe.routing_context import Report, Routed, Spread, attach
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import Placement, residual_placement


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
        self.experts = Experts(config, moe, axes, **on, stored_on=experts_on)
        self.shared = FeedForward(config, axes, width=moe.shared_width, **on) if moe.shared_width else None
        self.shared_gate = Linear(config.width, 1, bias=False, **on) if moe.shared_gate else None
        if self.shared_gate is not None:
            self.shared_gate.as_stored = True
        self.layout: dict[str, Placement] = {"shared_gate.weight": residual_placement(axes)} if moe.shared_gate else {}

    def forward(self, x_tD: Tensor, T: int, routed: Routed, noise: BlockDropout | None = None) -> tuple[Tensor, Report]:
        """y_tD of the residual stream of T tokens; ``noise`` is of the rows at hand, as ``x_tD``."""
        routing = routed.routing
        own = slice(*self.axes.token_replicas.part(T))  # these tokens are this rank's, whoever else has their rows
        own_tD, tokens_t = self.axes.split_tokens(x_tD), routed.tokens_T[own]
        index_t = torch.arange(own.start, own.stop, device=x_tD.device) if routing is None else routing.index_T[own]
        if noise is not None and not self.axes.sequence_parallel:
            noise = noise.rows(own)
        moe = self.moe if routing is None or routing.moe is None else routing.moe
        training = routing is not None and routing.weight is not None
        units = None if routing is None or routing.units is None else routing.units.rows(own)
        gate = 0 if routing is None else routing.gate
        choice, logits_tE = self.router(own_tD, tokens_t, index_t, noise, gate, training=training, units=units, moe=moe)
        load_E = load(choice.ids_TA, moe.experts)
        admitted = admit(choice, index_t, moe, self.axes.experts.tokens)
        step = routed.step or Spread(degree=self.axes.experts.sh.size)
        dropout = ExpertDropout.of(noise, admitted.ids_TA.shape[1])
        # Where all ranks hold the same tokens each may do its experts' part of all of them.
        summed = self.axes.cp_replicated and self.axes.experts.all.size > 1
        if summed:
            ids_TA, weights_TA = (
                self.axes.join_tokens(admitted.ids_TA, T),
                self.axes.join_tokens(admitted.weights_TA, T),
            )
            out_tD, sent_bytes = where_all_are(x_tD, ids_TA, weights_TA, self.experts, self.axes.experts)
        else:
            out_tD, sent_bytes = through_experts(
                own_tD,
                admitted.ids_TA,
                admitted.weights_TA,
                self.experts,
                self.axes.experts,
                step,
                choice.rows,
                dropout,
            )
        zero = out_tD.new_zeros(())
        if admitted.ids_TA is choice.ids_TA:
            dropped = torch.zeros((), dtype=torch.int64, device=x_tD.device)
        else:
            dropped = (admitted.ids_TA != choice.ids_TA).sum()
        sent = torch.full((), sent_bytes, device=x_tD.device)  # no copy from the host, which would wait
        finite = zero == 0 if logits_tE is None or not len(logits_tE) else _finite(logits_tE.detach())
        report = Report(load_E, zero, zero, dropped, sent, finite)
        if routing is not None and routing.weight is not None:
            surrogate, balance, z = losses(choice, load_E, logits_tE, moe, self.axes.experts.tokens, units)
            out_tD = attach(out_tD, surrogate, routing.weight)
            pooled = pool(choice, load_E) if moe.pools_layers else None
            report = report._replace(balance=balance, z=z, pool=pooled)
        if moe.dropped == "residual":
            lost_t1 = (choice.weights_TA * (admitted.ids_TA == moe.experts)).sum(1, keepdim=True)
            lost_tD = x_tD * self.axes.join_tokens(lost_t1, T) if summed else own_tD * lost_t1
            out_tD = out_tD + lost_tD.to(out_tD.dtype)
        y_tD = out_tD if summed else self.axes.join_tokens(out_tD, T)
        if self.shared is not None:
            shared_tD = self.shared(x_tD, T)
            y_tD = y_tD + (shared_tD if self.shared_gate is None else self.shared_gate(x_tD).sigmoid() * shared_tD)
        return y_tD, report


def _finite(logits_tE: Tensor) -> Tensor:
    """Whether all are, in one pass: the largest in size is below infinity, which it is not where there is a NaN."""
    return torch.linalg.vector_norm(logits_tE, float("inf")) < float("inf")
