"""Expert dropout: hidden units of the experts are dropped, at a rate of their own (Switch, arXiv 2101.03961, sec. 2.4).

An element is a token's j-th choice and a hidden unit's number among all of its expert's. What the choice brings along
is one int32, which travels with the row; the rest every rank knows of its own share of the hidden units. So whoever
computes a unit drops the same ones, at every degree, in the order of any exchange and when the pass runs again.

The experts of one layer: this rank's share of them, and of each one's hidden units.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig, MoeConfig
from colonnade.kernels.dropout import HiddenDropout, choice_hash, hidden_hash
from colonnade.kernels.experts import float8
from colonnade.kernels.experts.deferred_wgrad import Later
from colonnade.kernels.experts.loop import across
from colonnade.kernels.experts.quantised import Stacks
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.linear.quantise import Kind, Quantised
from colonnade.kernels.registry import LOOKUP, choose
from colonnade.model.activation_checkpointing import again
from colonnade.model.dropout import BlockDropout
from colonnade.model.linear import InFloat8, in_fewer_bits
from colonnade.parallel.axis import SOLO, Axes, Axis, Grid
from colonnade.parallel.layout import Experts as Stack
from colonnade.parallel.layout import Placement


@dataclass(frozen=True)
class ExpertDropout:
    """What is dropped within the experts that some tokens chose."""

    row_TA: Tensor
    """int32: what each choice brings along."""
    rate: float

    @staticmethod
    def of(noise: BlockDropout | None, active: int) -> "ExpertDropout | None":
        """For the ``active`` choices of each token of ``noise``; None where nothing is dropped."""
        if noise is None or not noise.rates.expert:
            return None
        return ExpertDropout(choice_hash(noise.key, noise.index_T, active), noise.rates.expert)

    def split(self, tokens: list[int]) -> "list[ExpertDropout]":
        """The same for so many tokens after one another."""
        return [replace(self, row_TA=part) for part in self.row_TA.split(tokens)]

    def tags(self, order_R: Tensor) -> Tensor:
        """int32 (R,): what the rows of these choices (t·A + j) bring along."""
        return self.row_TA.flatten()[order_R]

    def hidden(self, tag_R: Tensor, width: int, grid: Grid, degree: int = 1) -> HiddenDropout:
        """Of rows with these tags, in experts of ``width`` hidden units, for the rank's slice at this degree (1: all).

        A slice is what the sh ranks that are equal modulo the degree hold, one after another.
        """
        holders = range(grid.sh.rank % degree, grid.sh.size, degree)
        shares = [grid.sh.part(width, rank) for rank in holders]
        unit_F = torch.cat([torch.arange(start, stop, device=tag_R.device) for start, stop in shares])
        return HiddenDropout(tag_R, hidden_hash(unit_F), self.rate)


FEW, TWICE = 64, 2**26
"""Choices of few tokens at most, and bytes of weights that they are expected to read more than once: in that time they
are sorted.
"""


def are_few(T: int, A: int, E: int, weights: Weights) -> bool:
    """Whether T tokens that go to A of E experts each are so few that every choice should find its expert by itself.

    Two tokens that choose evenly have A²/E experts in common; of those that are among ``weights`` the weights are read
    again.
    """
    if T * A > FEW:
        return False
    return (A / E) ** 2 * T * (T - 1) / 2 * sum(w.nbytes for w in weights.tensors) <= TWICE


def unsorted(x_TD: Tensor, ids_TA: Tensor, weights: Weights, E: int) -> Callable[..., Tensor] | None:
    """What computes with choices as they come, where it can and they are few; None: they are to be sorted first."""
    run = LOOKUP.get(("few_token_experts", x_TD.device.type, x_TD.dtype, "auto"))
    if run is None or torch.is_grad_enabled() or not are_few(len(ids_TA), ids_TA.shape[1], E, weights):
        return None
    return run


class Experts(InFloat8):
    """Stacks of weights, hidden units first: (e, f, D) with e = E/ep experts and f = F/sh hidden units."""

    grouped = True

    def __init__(
        self,
        config: ModelConfig,
        moe: MoeConfig,
        axes: Axes,
        *,
        device: torch.device,
        dtype: torch.dtype,
        stored_on: torch.device | None = None,
    ):
        """For arithmetic on ``device``; ``stored_on`` another one, whence they are fetched
        (:mod:`~colonnade.model.moe.expert_offload`).
        """
        super().__init__()
        self.activation, self.count, self.width = config.activation, moe.experts, moe.ffn_width
        first, stop = axes.grid.ep.part(moe.experts)
        start, end = axes.grid.sh.part(moe.ffn_width)
        e, f, D = stop - first, end - start, config.width
        self.here = e
        """Experts of this rank."""
        self.stored_on = stored_on or device

        def stack(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=self.stored_on, dtype=dtype))

        self.gate = stack(e, f, D) if config.gated else None
        self.up, self.down = stack(e, f, D), stack(e, f, D)
        if device.type == "cpu" and across(f * D, dtype):  # the same numbers in another order in memory
            self.down = nn.Parameter(torch.empty(e, D, f, dtype=dtype).mT)
        self.layout: dict[str, Placement] = {"up": Stack(1), "down": Stack(1)}
        self.quantised: dict[str, Quantised] = {}
        """What stands in the place of up, down and gate; no buffers, so that a cast of the model leaves them alone."""
        self.fetch: Callable[[Tensor | None, int], Weights | Stacks] | None = None
        """Where this rank's weights come from, when they are not where they are stored (see
        :mod:`~colonnade.model.moe.expert_offload`)."""
        self.up_bias = self.gate_bias = self.down_bias = None
        if config.gated:
            self.layout["gate"] = Stack(1)
        if config.ffn_bias:
            self.up_bias, self.down_bias = stack(e, f), stack(e, D)
            self.layout |= {"up_bias": Stack(1), "down_bias": Stack()}
            if config.gated:
                self.gate_bias = stack(e, f)
                self.layout["gate_bias"] = Stack(1)

    @property
    def stored(self) -> Weights | Stacks:
        """This rank's, where they are stored."""
        if made := self.quantised:
            biases = self.up_bias, self.gate_bias, self.down_bias
            return Stacks(made["up"], made["down"], made.get("gate"), *biases)
        return Weights(self.up, self.down, self.gate, self.up_bias, self.gate_bias, self.down_bias)

    @property
    def weights(self) -> Weights | Stacks:
        """This rank's, as the kernels take them."""
        return self.stored if self.fetch is None else self.fetch(None, 0)

    def weights_for(self, ends_e: Tensor, rows: int) -> Weights | Stacks:
        """The same, where those of experts without any of the ``rows``, which end at ``ends_e``, may be anything."""
        return self.stored if self.fetch is None else self.fetch(ends_e, rows)

    @property
    def matrices(self) -> list[Tensor]:
        """This rank's weights without biases."""
        return [w for w in (self.up, self.down, self.gate) if w is not None]

    @property
    def size_bytes(self) -> int:
        """Of this rank's weights."""
        return sum(w.nbytes for w in self.stored if w is not None)

    def quantise(
        self, part: str, stack_efD: Tensor, kind: Kind, group: int, hidden: Axis, device: torch.device
    ) -> None:
        """From now on multiply with ``stack_efD``, in ``kind``, for ``part`` (up, down or gate), and have no other: one
        expert after another on ``device``, where the ranks along ``hidden`` have the rest of its hidden units.
        """
        down = part == "down"
        made: Quantised | None = None
        for e, w_fD in enumerate(stack_efD):
            w = w_fD.to(device)
            one = in_fewer_bits(w.T if down else w, kind, group, hidden.max_ if down else SOLO.max_)
            if made is None:
                values, scales = (
                    torch.empty(self.here, *t.shape, dtype=t.dtype, device=self.stored_on) for t in one[1:3]
                )
                made = one._replace(values=values, scales=scales)
            made.values[e], made.scales[e] = one.values, one.scales
        assert made is not None, "every rank has experts"
        self.quantised[part] = made
        delattr(self, part)

    def pin(self) -> None:
        """Have what is stored in host memory where copies of it need not wait for the host."""
        for parameter in self.parameters():
            parameter.data = parameter.data.pin_memory()
        for part, made in self.quantised.items():
            self.quantised[part] = made._replace(values=made.values.pin_memory(), scales=made.scales.pin_memory())

    def forward(
        self,
        x_TD: Tensor,
        order_R: Tensor,
        ends_e: Tensor,
        routing_TA: Tensor,
        weights: Weights | Stacks,
        dropout: HiddenDropout | None = None,
    ) -> Tensor:
        """y_TD of choices that are sorted by ``weights``' experts, whose hidden units ``dropout`` drops."""
        kind, dtype = x_TD.device.type, x_TD.dtype
        if isinstance(weights, Stacks):
            assert dropout is None, "what is quantised is not trained"
            run = choose("quantised_experts", kind, dtype)
            return run(x_TD, order_R, ends_e, routing_TA, weights, self.activation)
        if dropout is None:
            run = float8.routed if self.float8 else choose("routed_experts", kind, dtype)
            return run(x_TD, order_R, ends_e, routing_TA, weights, self.activation)
        assert not self.float8, "the config refuses expert dropout in float8"
        x_RD = choose("gather_rows", kind, dtype)(x_TD, order_R, routing_TA.shape[1])
        y_RD = choose("dropout_experts", kind, dtype)(x_RD, ends_e, weights, self.activation, dropout)
        return choose("combine_rows", kind, dtype)(y_RD, order_R, routing_TA)

    def few(self, x_TD: Tensor, ids_TA: Tensor, routing_TA: Tensor, *, biased: bool = True) -> Tensor | None:
        """y_TD of choices as they come, without a gradient, where a kernel sorts none and tokens are few; else None.
        ``biased``: with the output's bias, where there is one.
        """
        weights = self.stored
        if self.float8 or not isinstance(weights, Weights):
            return None
        run = unsorted(x_TD, ids_TA, weights, self.count)
        if run is None:
            return None
        if self.fetch is not None:  # which experts to fetch is still to be counted
            sort = choose("sort_by_expert", x_TD.device.type, x_TD.dtype)
            found = self.fetch(sort(ids_TA, self.here)[1], ids_TA.numel())
            assert isinstance(found, Weights), "what is stored as it is is fetched as it is"
            weights = found
        weights = weights if biased else weights._replace(down_bias_ED=None)
        return run(x_TD, ids_TA, routing_TA, weights, self.activation)

    def gathered(self, hidden: Axis, experts: Axis = SOLO) -> Weights:
        """The shares of the ranks along ``hidden``, and of those along ``experts``, laid together."""

        def whole(w: Tensor) -> Tensor:
            return experts.gather(w, 0, w.shape[0] * experts.size)

        return self._over_hidden(whole, hidden)

    def shadows(self, hot_E: Tensor, grid: Grid) -> Weights:
        """The weights of these experts, wherever they are stored."""
        place_E = hot_E - grid.ep.rank * (self.count // grid.ep.size)
        mine_E = (place_E >= 0) & (place_E < self.here)
        place_E = place_E.where(mine_E, 0)

        def copied(w: Tensor) -> Tensor:
            held = torch.where(mine_E.view(-1, *[1] * (w.dim() - 1)), w[place_E], 0)
            # Each rank uses the sum for its own tokens, so that gradients are summed too.
            return grid.ep.fan_out(grid.ep.fan_in(held))

        return self._over_hidden(copied, grid.sh)

    def _over_hidden(self, chosen: Callable[[Tensor], Tensor], hidden: Axis) -> Weights:
        """What ``chosen`` makes of each of this rank's stacks, with the shares of the ranks along ``hidden``."""

        def whole(w: Tensor) -> Tensor:
            return hidden.gather(chosen(w), 1, w.shape[1] * hidden.size)

        def perhaps(w: Tensor | None) -> Tensor | None:
            return None if w is None else whole(w)

        weights = self.weights
        assert isinstance(weights, Weights), "quantised experts stay on their ranks, whatever the degree"
        up, down, gate, up_bias, gate_bias, down_bias = weights
        output_bias = None if down_bias is None else chosen(down_bias)  # each rank has all of it
        return Weights(whole(up), whole(down), perhaps(gate), perhaps(up_bias), perhaps(gate_bias), output_bias)

    def later(self, grid: Grid, degree: int, kind: str, dtype: torch.dtype) -> Later | None:
        """This rank's weights for :meth:`slice_of`, whose gradients may come after what is made after this; None where
        they are gathered, not trained so, or no kernel owes them.
        """
        able = ("routed_experts_deferred_wgrad", kind, dtype, "auto") in LOOKUP
        if not able or grid.every(degree).size > 1 or self.fetch is not None or self.quantised or self.float8:
            return None
        weights = self.stored
        assert isinstance(weights, Weights)
        return Later(weights if grid.sh.rank % degree == 0 else weights._replace(down_bias_ED=None))

    def slice_of(
        self,
        x_RD: Tensor,
        by_expert_R: Tensor,
        ends_e: Tensor,
        grid: Grid,
        degree: int,
        dropout: HiddenDropout | None = None,
        later: Later | None = None,
    ) -> Tensor:
        """What the hidden slice s mod ``degree`` adds to y_RD, in the order of x_RD; the output's bias is the first
        slice's. ``dropout`` is of the rows by expert; ``later`` is :meth:`later`'s, without dropout.
        """
        axis, first = grid.every(degree), grid.sh.rank % degree == 0
        if later is not None:
            run = choose("routed_experts_deferred_wgrad", x_RD.device.type, x_RD.dtype)
            return run(x_RD, by_expert_R, ends_e, x_RD.new_ones(len(x_RD), 1), later, self.activation)
        if axis.size == 1:
            return self._slice(x_RD, by_expert_R, ends_e, axis, first, dropout)
        return again(self._slice, x_RD, by_expert_R, ends_e, axis, first, dropout)  # gathered weights are not kept

    def _slice(
        self, x_RD: Tensor, by_expert_R: Tensor, ends_e: Tensor, axis: Axis, first: bool, dropout: HiddenDropout | None
    ) -> Tensor:
        weights = self.gathered(axis) if axis.size > 1 else self.weights_for(ends_e, len(x_RD))
        weights = weights if first else weights._replace(down_bias_ED=None)
        # Each row is a token of one choice: the first product gathers the rows, the last step puts them back.
        return self(x_RD, by_expert_R, ends_e, x_RD.new_ones(len(x_RD), 1), weights, dropout)
