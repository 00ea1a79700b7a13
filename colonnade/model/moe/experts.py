"""The experts of one layer: this rank's experts, and its share of their hidden units.

A :class:`~colonnade.model.moe.dispatch.Dispatch` brings rows of tokens and weights of experts together on a rank
(:class:`ExpertRows`); :class:`Experts` computes them.

Expert dropout drops hidden units of experts at a separate rate (Switch, arXiv 2101.03961, section 2.4). The mask is
a hash of an int32 tag, one for each choice (token t, j-th expert), and of the hidden unit's number in the whole expert.
The tag travels with the row, so any rank, degree or exchange order, and any recomputation, drops the same elements.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig, MoeConfig
from colonnade.kernels.dropout import HiddenDropout, choice_hash, hidden_hash
from colonnade.kernels.experts import float8
from colonnade.kernels.experts.deferred_wgrad import DeferredWgrad
from colonnade.kernels.experts.loop import down_column_major
from colonnade.kernels.experts.quantised import QuantisedWeights
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.linear.quantise import Kind, Quantised
from colonnade.kernels.registry import LOOKUP, choose
from colonnade.model.activation_checkpointing import checkpointed
from colonnade.model.dropout import BlockDropout
from colonnade.model.lora import ExpertPairs
from colonnade.model.tensor_parallel_linear import Float8Module, quantise_finite
from colonnade.parallel.axis import SOLO, Axes, Axis, ExpertAxes
from colonnade.parallel.layout import Experts as Stack
from colonnade.parallel.layout import Placement


@dataclass(frozen=True)
class ExpertDropout:
    """Dropout of the hidden units of chosen experts."""

    tag_TA: Tensor
    """int32: the tag of each choice."""
    rate: float

    @staticmethod
    def of(noise: BlockDropout | None, active: int) -> "ExpertDropout | None":
        """For ``active`` choices of each token of ``noise``; None if nothing is dropped."""
        if noise is None or not noise.rates.expert:
            return None
        return ExpertDropout(choice_hash(noise.key, noise.index_T, active), noise.rates.expert)

    def split(self, tokens: list[int]) -> "list[ExpertDropout]":
        """Split by consecutive runs of so many tokens."""
        return [replace(self, tag_TA=part) for part in self.tag_TA.split(tokens)]

    def tags(self, order_R: Tensor) -> Tensor:
        """int32 (R,): the tags of the choices (t·A + j) in ``order_R``."""
        return self.tag_TA.flatten()[order_R]

    def hidden(self, tag_R: Tensor, width: int, grid: ExpertAxes, degree: int = 1) -> HiddenDropout:
        """The mask of rows with these tags, for the rank's slice of ``width`` hidden units at this degree (1: all).

        A slice is the shares of the etp ranks that are equal modulo the degree, one after another.
        """
        holders = range(grid.etp.rank % degree, grid.etp.size, degree)
        shares = [grid.etp.part(width, rank) for rank in holders]
        unit_F = torch.cat([torch.arange(start, stop, device=tag_R.device) for start, stop in shares])
        return HiddenDropout(tag_R, hidden_hash(unit_F), self.rate)


class ExpertRows(NamedTuple):
    """Tokens for the experts of one rank, and the weights to use: one batch of work from a dispatch."""

    x_TD: Tensor
    weights_TA: Tensor
    """The router's weight of each choice."""
    ids_TA: Tensor | None = None
    """The expert of each choice among the experts used here; their number for none. None: already sorted."""
    order: tuple[Tensor, Tensor] | None = None
    """(order_R, ends_e): choices sorted by expert, and each expert's end."""
    max_choices: int | None = None
    """An upper bound of the choices that are not none, if it is less than T·A."""
    mask_TA: Tensor | None = None
    """Choices whose weight counts; None: all of them."""
    gather: Callable[[], Weights] | None = None
    """Gathers the weights from other ranks, again in the backward pass; None: the experts of this rank."""
    adaptive_r: int = 1
    """Hidden units are slice s mod degree."""
    output_bias: bool = True
    """Whether to add the output bias: one of the ranks that share an expert adds it."""
    dropout: ExpertDropout | None = None
    deferred: DeferredWgrad | None = None
    """This rank's weights, whose gradients are computed after the rows' gradients have been sent."""


MAX_UNSORTED_CHOICES, MAX_REREAD_BYTES = 64, 2**26
"""Up to so many choices, and so many expected bytes of weights read twice, sorting takes longer than it saves."""


def sorting_costs_more(T: int, A: int, E: int, weights: Weights) -> bool:
    """Whether a kernel that reads the weights for each choice beats sorting T tokens with A of E experts each.

    Two tokens that choose uniformly have A²/E experts in common; the weights of those are read twice.
    """
    if T * A > MAX_UNSORTED_CHOICES:
        return False
    return (A / E) ** 2 * T * (T - 1) / 2 * sum(w.nbytes for w in weights.tensors) <= MAX_REREAD_BYTES


def unsorted_kernel(x_TD: Tensor, ids_TA: Tensor, weights: Weights, E: int) -> Callable[..., Tensor] | None:
    """The kernel that takes choices without sorting, if it exists and pays off; else None."""
    run = LOOKUP.get(("few_token_experts", x_TD.device.type, x_TD.dtype, "auto"))
    if run is None or torch.is_grad_enabled() or not sorting_costs_more(len(ids_TA), ids_TA.shape[1], E, weights):
        return None
    return run


class Experts(Float8Module):
    """Stacks of weights, hidden units first: (e, f, D) with e = E/ep experts and f = F/etp hidden units."""

    grouped = True

    def __init__(
        self,
        config: ModelConfig,
        moe: MoeConfig,
        axes: Axes,
        *,
        device: torch.device,
        dtype: torch.dtype,
        storage_device: torch.device | None = None,
    ):
        """Compute on ``device``; ``storage_device``: where weights are stored, if elsewhere
        (:mod:`~colonnade.model.moe.expert_offload`).
        """
        super().__init__()
        self.activation, self.count = config.activation, moe.stored_experts
        self.width, self.grid = moe.ffn_width, axes.experts
        first, stop = axes.experts.ep.part(self.count)
        start, end = axes.experts.etp.part(moe.ffn_width)
        e, f, D = stop - first, end - start, config.width
        self.local_count = e
        """Experts of this rank; ``count`` is that of all ranks."""
        self.storage_device = storage_device or device

        def stack(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=self.storage_device, dtype=dtype))

        self.gate = stack(e, f, D) if config.gated else None
        self.up, self.down = stack(e, f, D), stack(e, f, D)
        if device.type == "cpu" and down_column_major(f * D, dtype):  # transposed in memory: the CPU's kernel is faster
            self.down = nn.Parameter(torch.empty(e, D, f, dtype=dtype).mT)
        self.layout: dict[str, Placement] = {"up": Stack(1), "down": Stack(1)}
        self.quantised: dict[str, Quantised] = {}
        """Replaces up, down and gate; not buffers, so that a cast of the model does not touch them."""
        self.kernels = "auto"
        """Name of the kernels of quantised experts."""
        self.fetch: Callable[[Tensor | None, int], Weights | QuantisedWeights] | None = None
        """Fetches offloaded weights (:mod:`~colonnade.model.moe.expert_offload`); None: they are on the device."""
        self.up_bias = self.gate_bias = self.down_bias = None
        if config.gated:
            self.layout["gate"] = Stack(1)
        if config.ffn_bias:
            self.up_bias, self.down_bias = stack(e, f), stack(e, D)
            self.layout |= {"up_bias": Stack(1), "down_bias": Stack()}
            if config.gated:
                self.gate_bias = stack(e, f)
                self.layout["gate_bias"] = Stack(1)

        self.adapter: ExpertPairs | None = None
        if config.lora is not None and (parts := tuple(p for p in ("gate", "up", "down") if p in config.lora.targets)):
            parts = parts if config.gated else tuple(part for part in parts if part != "gate")
            self.adapter = ExpertPairs(parts, e, f, D, moe.ffn_width, config.lora, device=device, dtype=dtype)

    @property
    def stored(self) -> Weights | QuantisedWeights:
        """This rank's weights with their adapters, where they are stored."""
        if stacks := self.quantised:
            biases = self.up_bias, self.gate_bias, self.down_bias
            return QuantisedWeights(stacks["up"], stacks["down"], stacks.get("gate"), *biases)
        up, down, gate = self.up, self.down, self.gate
        if self.adapter is not None:
            up, down, gate = (
                w if w is None or part not in self.adapter.parts else w + self.adapter.delta(part)
                for part, w in (("up", up), ("down", down), ("gate", gate))
            )
        assert up is not None
        assert down is not None
        return Weights(up, down, gate, self.up_bias, self.gate_bias, self.down_bias)

    @property
    def matrices(self) -> list[Tensor]:
        """This rank's weights without biases."""
        return [w for w in (self.up, self.down, self.gate) if w is not None]

    @property
    def size_bytes(self) -> int:
        """Memory of this rank's weights [bytes]."""
        return sum(w.nbytes for w in self.stored if w is not None)

    def quantise(
        self, part: str, stack_efD: Tensor, kind: Kind, group: int, hidden: Axis, device: torch.device
    ) -> None:
        """Replace ``part`` (up, down or gate) by ``stack_efD``, quantised to ``kind`` (:meth:`quantise_stack`)."""
        self.quantised[part] = self.quantise_stack(part, stack_efD, kind, group, hidden, device, self.storage_device)
        delattr(self, part)

    def quantise_stack(
        self,
        part: str,
        stack_efD: Tensor,
        kind: Kind,
        group: int,
        hidden: Axis,
        device: torch.device,
        storage_device: torch.device,
    ) -> Quantised:
        """Return ``stack_efD``, of ``part`` (up, down or gate), quantised to ``kind``, on ``storage_device``.

        Experts are quantised one after another on ``device``; the ranks along ``hidden`` have the other hidden units.
        """
        down = part == "down"
        stack: Quantised | None = None
        for e, w_fD in enumerate(stack_efD):
            w = w_fD.to(device)
            one = quantise_finite(w.T if down else w, kind, group, hidden.max_ if down else SOLO.max_)
            if stack is None:
                values, scales = (
                    torch.empty(self.local_count, *t.shape, dtype=t.dtype, device=storage_device) for t in one[1:3]
                )
                stack = one._replace(values=values, scales=scales)
            stack.values[e], stack.scales[e] = one.values, one.scales
        assert stack is not None, "every rank has experts"
        return stack

    def pin(self) -> None:
        """Move stored weights to pinned host memory, for asynchronous copies."""
        for parameter in self.parameters():
            parameter.data = parameter.data.pin_memory()
        for part, stack in self.quantised.items():
            self.quantised[part] = stack._replace(values=stack.values.pin_memory(), scales=stack.scales.pin_memory())

    def forward(self, rows: ExpertRows) -> Tensor:
        """y_TD: the weighted sum of each token's experts; gathered weights are gathered again in the backward pass."""
        return self._compute(rows) if rows.gather is None else checkpointed(self._compute, rows)

    def _compute(self, rows: ExpertRows) -> Tensor:
        x_TD, kind, dtype, routing_TA = rows.x_TD, rows.x_TD.device.type, rows.x_TD.dtype, rows.weights_TA
        if rows.deferred is not None:
            assert rows.order is not None
            run = choose("routed_experts_deferred_wgrad", kind, dtype)
            return run(x_TD, *rows.order, routing_TA, rows.deferred, self.activation)
        if rows.gather is None and rows.dropout is None and (y_TD := self._unsorted(rows)) is not None:
            return y_TD
        gathered = None if rows.gather is None else rows.gather()
        order_R, ends_e = rows.order or self._sorted(rows, gathered)
        weights = self._local_weights(ends_e, len(order_R)) if gathered is None else gathered
        if not rows.output_bias:
            weights = weights._replace(down_bias_ED=None)
        if rows.mask_TA is not None:
            routing_TA = routing_TA * rows.mask_TA
        if isinstance(weights, QuantisedWeights):
            assert rows.dropout is None, "quantised experts are not trained"
            run = choose("quantised_experts", kind, dtype, self.kernels)
            return run(x_TD, order_R, ends_e, routing_TA, weights, self.activation)
        if rows.dropout is None:
            run = float8.routed if self.float8 else choose("routed_experts", kind, dtype)
            return run(x_TD, order_R, ends_e, routing_TA, weights, self.activation)
        assert not self.float8, "the config refuses expert dropout in float8"
        hidden = rows.dropout.hidden(rows.dropout.tags(order_R), self.width, self.grid, rows.adaptive_r)
        x_RD = choose("gather_rows", kind, dtype)(x_TD, order_R, routing_TA.shape[1])
        y_RD = choose("dropout_experts", kind, dtype)(x_RD, ends_e, weights, self.activation, hidden)
        return choose("combine_rows", kind, dtype)(y_RD, order_R, routing_TA)

    def _sorted(self, rows: ExpertRows, gathered: Weights | None) -> tuple[Tensor, Tensor]:
        """(order_R, ends_e) of choices that are not sorted yet."""
        sort = choose("sort_by_expert", rows.x_TD.device.type, rows.x_TD.dtype)
        count = self.local_count if gathered is None else len(gathered.up_EFD)
        return sort(rows.ids_TA, count, rows.max_choices)

    def _unsorted(self, rows: ExpertRows) -> Tensor | None:
        """y_TD without sorting and without a gradient, where a kernel does that and tokens are few; else None."""
        weights = self.stored
        if self.float8 or rows.ids_TA is None or not isinstance(weights, Weights):
            return None
        run = unsorted_kernel(rows.x_TD, rows.ids_TA, weights, self.count)
        if run is None:
            return None
        if self.fetch is not None:  # count the choices to determine which experts to fetch
            sort = choose("sort_by_expert", rows.x_TD.device.type, rows.x_TD.dtype)
            fetched = self.fetch(sort(rows.ids_TA, self.local_count)[1], rows.ids_TA.numel())
            assert isinstance(fetched, Weights), "offloading does not change the format"
            weights = fetched
        weights = weights if rows.output_bias else weights._replace(down_bias_ED=None)
        return run(rows.x_TD, rows.ids_TA, rows.weights_TA, weights, self.activation)

    def _local_weights(self, ends_e: Tensor, rows: int) -> Weights | QuantisedWeights:
        """This rank's weights; those of experts with none of the ``rows`` by ``ends_e`` may be undefined."""
        return self.stored if self.fetch is None else self.fetch(ends_e, rows)

    def gathered(self, hidden: Axis, experts: Axis = SOLO) -> Weights:
        """The weights of the ranks along ``hidden``, and of those along ``experts``, concatenated."""

        def all_experts(w: Tensor) -> Tensor:
            return experts.gather(w, 0, w.shape[0] * experts.size)

        return self._gather_hidden(all_experts, hidden)

    def shadowed(self, hot_E: Tensor) -> Weights:
        """The weights of the experts ``hot_E``, on every rank."""
        grid = self.grid
        local_E = hot_E - grid.ep.rank * (self.count // grid.ep.size)
        mine_E = (local_E >= 0) & (local_E < self.local_count)
        local_E = local_E.where(mine_E, 0)

        def copied(w: Tensor) -> Tensor:
            mine = torch.where(mine_E.view(-1, *[1] * (w.dim() - 1)), w[local_E], 0)
            # Each rank uses the sum for its own tokens, so the gradients are summed too.
            return grid.ep.fan_out(grid.ep.fan_in(mine))

        return self._gather_hidden(copied, grid.etp)

    def _gather_hidden(self, select: Callable[[Tensor], Tensor], hidden: Axis) -> Weights:
        """``select`` of each of this rank's stacks, with the hidden units of the ranks along ``hidden``."""

        def whole(w: Tensor | None) -> Tensor | None:
            return None if w is None else hidden.gather(select(w), 1, w.shape[1] * hidden.size)

        weights = self.stored if self.fetch is None else self.fetch(None, 0)
        assert isinstance(weights, Weights), "quantised experts are never gathered"
        output_bias = None if weights.down_bias_ED is None else select(weights.down_bias_ED)  # not cut by hidden units
        return Weights(*(whole(w) for w in weights[:5]), output_bias)  # type: ignore[arg-type]

    def deferred(self, degree: int, kind: str, dtype: torch.dtype) -> DeferredWgrad | None:
        """This rank's weights with gradients deferred until nodes made after this one have run backward.

        None if weights are gathered, offloaded, quantised or float8, or if no kernel defers.
        """
        supported = ("routed_experts_deferred_wgrad", kind, dtype, "auto") in LOOKUP
        axis = self.grid.hidden_slice(degree)
        if not supported or axis.size > 1 or self.fetch is not None or self.quantised or self.float8:
            return None
        weights = self.stored
        assert isinstance(weights, Weights)
        return DeferredWgrad(weights if self.grid.etp.rank % degree == 0 else weights._replace(down_bias_ED=None))

    def slice_rows(
        self,
        x_RD: Tensor,
        order: tuple[Tensor, Tensor],
        degree: int,
        dropout: ExpertDropout | None = None,
        deferred: DeferredWgrad | None = None,
    ) -> ExpertRows:
        """Received rows, one choice each, for hidden slice s mod ``adaptive_r``; slice 0 adds the output bias."""
        axis = self.grid.hidden_slice(degree)
        return ExpertRows(
            x_RD, x_RD.new_ones(len(x_RD), 1), order=order,
            gather=partial(self.gathered, axis) if axis.size > 1 else None, adaptive_r=degree,
            output_bias=self.grid.etp.rank % degree == 0, dropout=dropout, deferred=deferred,
        )  # fmt: skip
