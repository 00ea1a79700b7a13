"""A mixture of experts: Router, Dispatch, Experts, Combine, plus shared experts.

    y = Σ_j w_j · expert_{i_j}(x) + shared(x)

A dense feed-forward part is one expert; with and without capacity differ in the choices that are kept before Dispatch
(GShard, arXiv 2006.16668; MegaBlocks, arXiv 2211.15841).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig, MoeConfig
from colonnade.model.dropout import BlockDropout
from colonnade.model.ffn import FeedForward
from colonnade.model.moe.capacity import KeptChoices, apply_capacity
from colonnade.model.moe.dispatch import choose_dispatch
from colonnade.model.moe.experts import ExpertDropout, Experts
from colonnade.model.moe.losses import balance_losses, expert_load, layer_sums
from colonnade.model.moe.router import OUTPUT_MASK, Router, RouterOutput
from colonnade.model.moe.routing_context import LayerReport, LayerRouting, TokenGroups, attach
from colonnade.model.tensor_parallel_linear import Linear
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import Placement, residual_placement


class _Tokens(NamedTuple):
    """The tokens that this rank routes: each token of the stage is routed by one rank."""

    x_tD: Tensor
    ids_t: Tensor
    index_t: Tensor
    noise: BlockDropout | None
    groups: TokenGroups | None


class MixtureOfExperts(nn.Module):
    """x_tD to y_tD, and a report of the routing."""

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
        """``experts_on``: where routed experts are stored, if not on ``device``."""
        super().__init__()
        self.moe, self.axes = moe, axes
        on = {"device": device, "dtype": dtype}
        self.router = Router(config, moe, axes, **on)
        self.experts = Experts(config, moe, axes, **on, storage_device=experts_on)
        self.shared = FeedForward(config, axes, width=moe.shared_width, **on) if moe.shared_width else None
        self.shared_gate = Linear(config.width, 1, bias=False, **on) if moe.shared_gate else None
        if self.shared_gate is not None:
            self.shared_gate.never_quantise = True
        self.group_E: Tensor | None
        groups_E = torch.arange(moe.experts, dtype=torch.int32, device=device) % moe.merged if moe.merged else None
        self.register_buffer("group_E", groups_E)
        self.layout: dict[str, Placement] = {"shared_gate.weight": residual_placement(axes)} if moe.shared_gate else {}

    def forward(
        self, x_tD: Tensor, T: int, layer: LayerRouting, noise: BlockDropout | None = None
    ) -> tuple[Tensor, LayerReport]:
        """y_tD of the residual stream of T tokens; ``noise`` is that of the rows of ``x_tD``."""
        routing = layer.routing
        gate, moe, training = 0, self.moe, False
        if routing is not None:
            gate, moe, training = routing.gate, routing.moe or moe, routing.weight is not None
        # Where all ranks have the same tokens, each computes its own experts for all of them.
        replicated = self.axes.cp_replicated and self.axes.experts.all.size > 1
        own = self._own_tokens(x_tD, T, layer, noise)

        choice, logits_tE = self.router(*own[:4], gate, training=training, token_groups=own.groups, moe=moe)
        kept = apply_capacity(choice, own.index_t, moe, self.axes.experts.tokens, own.groups)
        if moe.output_mask:
            kept = kept._replace(weights_TA=kept.weights_TA * _output_mask(moe, own.noise, kept, training=training))
        dropout = ExpertDropout.of(own.noise, kept.ids_TA.shape[1])
        dispatch = choose_dispatch(self.experts, layer.dispatch, replicated, choice.max_choices, dropout)
        ids_tA, weights_tA = self._stored(kept.ids_TA), kept.weights_TA
        if replicated:
            rows = dispatch.send(x_tD, self.axes.join_tokens(ids_tA, T), self.axes.join_tokens(weights_tA, T))
        else:
            rows = dispatch.send(own.x_tD, ids_tA, weights_tA)
        out_tD = dispatch.combine(map(self.experts, rows))

        load_E = expert_load(choice.ids_TA, moe.experts)
        report = _report(choice, kept, load_E, logits_tE, dispatch.sent_bytes, out_tD)
        if routing is not None and routing.weight is not None:
            surrogate, balance, z = balance_losses(choice, load_E, logits_tE, moe, self.axes.experts.tokens, own.groups)
            out_tD = attach(out_tD, surrogate, routing.weight)
            sums = layer_sums(choice, load_E) if moe.pools_layers else None
            report = report._replace(balance=balance, z=z, sums=sums)
        if moe.dropped_token_output == "residual":
            dropped_t1 = (choice.weights_TA * (kept.ids_TA == moe.experts)).sum(1, keepdim=True)
            residual_tD = x_tD * self.axes.join_tokens(dropped_t1, T) if replicated else own.x_tD * dropped_t1
            out_tD = out_tD + residual_tD.to(out_tD.dtype)
        y_tD = out_tD if replicated else self.axes.join_tokens(out_tD, T)
        return y_tD if self.shared is None else y_tD + self._shared(x_tD, T), report

    def _own_tokens(self, x_tD: Tensor, T: int, layer: LayerRouting, noise: BlockDropout | None) -> _Tokens:
        """The tokens that this rank routes, also if other ranks have them in their residual stream."""
        routing, own = layer.routing, slice(*self.axes.token_replicas.part(T))
        if routing is None:
            index_t, groups = torch.arange(own.start, own.stop, device=x_tD.device), None
        else:
            index_t, groups = routing.index_T[own], routing.token_groups and routing.token_groups.rows(own)
        if noise is not None and not self.axes.sequence_parallel:
            noise = noise.rows(own)
        return _Tokens(self.axes.split_tokens(x_tD), layer.tokens_T[own], index_t, noise, groups)

    def _stored(self, ids_tA: Tensor) -> Tensor:
        """The stored expert of each of the router's choices: itself, or the one that it is merged into."""
        if self.group_E is None:
            return ids_tA
        E = self.moe.experts
        return torch.where(ids_tA < E, self.group_E[ids_tA.clamp(max=E - 1)].long(), self.experts.count)

    def _shared(self, x_tD: Tensor, T: int) -> Tensor:
        assert self.shared is not None
        y_tD = self.shared(x_tD, T)
        return y_tD if self.shared_gate is None else self.shared_gate(x_tD).sigmoid() * y_tD


def _output_mask(moe: MoeConfig, noise: BlockDropout | None, kept: KeptChoices, *, training: bool) -> Tensor | float:
    """The factor of each choice's weight: 0 or 1 in training, otherwise their mean."""
    if not training:
        return 1 - moe.output_mask
    assert noise is not None, "expert output masking needs random numbers in training"
    return (noise.uniform(kept.weights_TA.shape[1], OUTPUT_MASK) >= moe.output_mask).to(kept.weights_TA.dtype)


def _report(
    choice: RouterOutput, kept: KeptChoices, load_E: Tensor, logits_tE: Tensor | None, sent_bytes: int, out_tD: Tensor
) -> LayerReport:
    """The report of a layer, without losses; no copy from the host, which would wait for the device."""
    zero = out_tD.new_zeros(())
    if kept.ids_TA is choice.ids_TA:
        dropped = torch.zeros((), dtype=torch.int64, device=out_tD.device)
    else:
        dropped = (kept.ids_TA != choice.ids_TA).sum()
    sent = torch.full((), sent_bytes, device=out_tD.device)
    finite = zero == 0 if logits_tE is None or not len(logits_tE) else _all_finite(logits_tE.detach())
    return LayerReport(load_E, zero, zero, dropped, sent, finite)


def _all_finite(logits_tE: Tensor) -> Tensor:
    """Whether all values are finite, in one pass: the infinity norm is below infinity, and NaN if any value is NaN."""
    return torch.linalg.vector_norm(logits_tE, float("inf")) < float("inf")
