"""Autotunes degree r and overlap p of each MoE layer, from measured link speeds and the layer's actual load.

Modelled cost of a step at (r, p), forward and backward, on the slowest rank; b are the bytes of this rank's weight
shards, c those of a token, W = ep·etp ranks, n the choices of a rank's tokens, m those of the busiest ep rank:

    r = 0    3 · gather(b·(W − 1))                                         + compute(n)
    r ≥ 1    3p · gather(b·(etp/r − 1)) + 4 · exchange(c·n·r·(W − 1)/W)     + compute(m/etp)

Overlap in p parts hides the shorter of exchange and compute, except for the first part's share, which is smaller than
1/p (:func:`colonnade.model.moe.dispatch.part_sizes`), and costs the latency of the exchange p times. (Tutel, arXiv
2206.03382, section 4.1, compares 2P with 4·C_g·r + 2P/(E·r) bytes. Here bytes become seconds by measured link speeds,
and the load counts: only at r = 0 is it balanced by construction.)

The model ignores launches, the slowdown of GEMMs during communication, and the inefficiency of small GEMMs. So the
spreads that it rates nearly best are timed at the actual load (forward and backward, random tokens and weights), and
the fastest is chosen. Each rank draws its tokens' experts from the load of all ranks, and the slowest rank counts: all
ranks see the same times and make the same decision. Timings are cached by skew and number of tokens, since timing takes
as long as several steps of a layer. A change must promise 3% of the time, or noise would make the choice oscillate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from colonnade.config.model import divisors
from colonnade.model import Transformer
from colonnade.model.moe import DispatchOptions, MixtureOfExperts
from colonnade.model.moe.dispatch import part_sizes, run_experts
from colonnade.model.moe.experts import ExpertRows, Experts
from colonnade.parallel import link_bandwidth
from colonnade.parallel.axis import ExpertAxes
from colonnade.parallel.link_bandwidth import Link

BUCKET_FACTOR = 1.25
"""Loads and token counts that differ by less than this factor share a timing."""
MIN_GAIN = 0.03
"""The share of a layer's time that a change must save."""
CANDIDATE_FACTOR = 1.5
"""Spreads are timed if their modelled cost is at most this multiple of the least."""
CHECK_INTERVAL = 10
"""Steps between two decisions."""
OVERLAPS = (1, 2, 3, 4, 6)
PROBE_ROWS = 256
"""Rows of each expert in the measurement of its FLOP/s."""


class SpreadTimings:
    """Measured times of spreads, cached by load."""

    def __init__(self, model: Transformer):
        self.model = model
        self._seconds: dict[tuple[int, int, DispatchOptions], float] = {}

    def seconds(
        self, spreads: Sequence[DispatchOptions], module: MixtureOfExperts, tokens: int, load: Sequence[int]
    ) -> dict[DispatchOptions, float]:
        """Time of each of ``spreads`` for ``tokens`` tokens per rank, with choices distributed over experts as
        ``load``.

        Collective over all ranks that share experts.
        """
        ep = self.model.axes.experts.ep.size
        each = len(load) // ep
        skew = max(sum(load[i : i + each]) for i in range(0, len(load), each)) * ep / sum(load)
        key = round(math.log(max(tokens, 1), BUCKET_FACTOR)), round(math.log(skew, BUCKET_FACTOR))
        missing = [spread for spread in spreads if (*key, spread) not in self._seconds]
        if missing:
            for spread, seconds in zip(missing, self._measure(missing, module, tokens, load), strict=True):
                self._seconds[*key, spread] = seconds
        return {spread: self._seconds[*key, spread] for spread in spreads}

    def _measure(
        self, spreads: Sequence[DispatchOptions], module: MixtureOfExperts, tokens: int, load: Sequence[int]
    ) -> list[float]:
        axes, moe = self.model.axes, module.moe
        like = module.experts.up
        experts = Experts(self.model.config, moe, axes, device=like.device, dtype=like.dtype)
        experts.float8 = module.experts.float8
        generator = torch.Generator(like.device).manual_seed(axes.experts.tokens.rank)
        with torch.no_grad():
            for w in experts.parameters():
                w.normal_(0, 0.02, generator=generator)
        options = {"device": like.device, "generator": generator}
        x_tD = torch.randn(tokens, like.shape[2], dtype=like.dtype, **options).requires_grad_()
        load_E = torch.tensor(load, dtype=torch.float32, device=like.device)
        ids_R = torch.multinomial(load_E, max(1, tokens * moe.active), replacement=True, generator=generator)
        ids_tA = ids_R[: tokens * moe.active].view(tokens, moe.active)
        weights_tA = torch.rand(tokens, moe.active, **options).requires_grad_()
        inputs = [x_tD, weights_tA, *experts.parameters()]

        def run(spread: DispatchOptions) -> None:
            y_tD = run_experts(x_tD, ids_tA, weights_tA, experts, spread)
            torch.autograd.grad(y_tD, inputs, y_tD.detach(), allow_unused=True)

        return [
            link_bandwidth.slowest_seconds(lambda spread=spread: run(spread), like.device, axes.experts.tokens)
            for spread in spreads
        ]


@dataclass(frozen=True)
class MeasuredCosts:
    """Measured speed of links and experts."""

    exchange: Link
    gathers: dict[int, Link]
    """By degree: the all-gather of the weight shards."""
    flops_per_s: float
    """Of the experts' forward GEMMs."""

    @staticmethod
    def measured(model: Transformer) -> "MeasuredCosts":
        """Measure them; collective over all ranks that share experts."""
        grid, layer = model.axes.experts, _moe_layers(model)[0][1]
        device = layer.experts.up.device
        e, f, D = layer.experts.up.shape
        x_RD = torch.randn(e * PROBE_ROWS, D, device=device, dtype=layer.experts.up.dtype)
        order_R = torch.arange(e * PROBE_ROWS, device=device)
        ends_e = torch.arange(1, e + 1, device=device) * PROBE_ROWS

        @torch.no_grad()
        def run_experts() -> None:
            layer.experts(ExpertRows(x_RD, x_RD.new_ones(len(x_RD), 1), order=(order_R, ends_e)))

        seconds = link_bandwidth.slowest_seconds(run_experts, device, grid.tokens)
        gathers = {r: link_bandwidth.all_gather_link(grid.hidden_slice(r), device) for r in divisors(grid.etp.size)}
        gathers[0] = link_bandwidth.all_gather_link(grid.all, device)
        flops = 2 * len(layer.experts.matrices) * e * PROBE_ROWS * f * D
        return MeasuredCosts(link_bandwidth.all_to_all_link(grid.all, device), gathers, flops / seconds)


@dataclass(frozen=True)
class LayerLoad:
    """The sizes and the load that determine a layer's cost."""

    ep: int
    etp: int
    choices: float
    """Of one rank's tokens."""
    busiest: float
    """Choices of the busiest ep rank, all its etp ranks together."""
    token_bytes: int
    weight_bytes: int
    """This rank's shards."""
    flops: float
    """Of one choice, forward, over the whole hidden width."""


def modelled_seconds(spread: DispatchOptions, layer: LayerLoad, costs: MeasuredCosts) -> float:
    """The modelled cost of one step of ``layer``, as far as it depends on ``spread``."""
    ranks, r = layer.ep * layer.etp, spread.adaptive_r
    if r == 0:
        gathered_s = 3 * costs.gathers[0].seconds(layer.weight_bytes * (ranks - 1))
        return gathered_s + 3 * layer.choices * layer.flops / costs.flops_per_s
    others = layer.etp // r - 1
    gathered_s = 3 * spread.overlap * costs.gathers[r].seconds(layer.weight_bytes * others) if others else 0.0
    sent_bytes = layer.token_bytes * layer.choices * r * (ranks - 1) / ranks
    latency_s = 4 * costs.exchange.latency_s * spread.overlap
    exchange_s = 4 * sent_bytes / costs.exchange.bytes_per_s
    compute_s = 3 * layer.busiest / layer.etp * layer.flops / costs.flops_per_s
    hidden_s = (1 - 1 / sum(part_sizes(spread.overlap))) * min(exchange_s, compute_s)
    return gathered_s + latency_s + exchange_s + compute_s - hidden_s


def candidates(current: DispatchOptions, layer: LayerLoad, costs: MeasuredCosts) -> list[DispatchOptions]:
    """The current spread, then all whose modelled cost is nearly the least, cheapest first."""
    spreads = [DispatchOptions(0, 1)] + [DispatchOptions(r, p) for r in divisors(layer.etp) for p in OVERLAPS]
    cost = {spread: modelled_seconds(spread, layer, costs) for spread in spreads}
    limit = CANDIDATE_FACTOR * min(cost.values())
    near = sorted((spread for spread in spreads if cost[spread] <= limit), key=lambda spread: cost[spread])
    return [current, *(spread for spread in near if spread != current)]


def pick_spread(current: DispatchOptions, seconds: Mapping[DispatchOptions, float]) -> DispatchOptions:
    """The fastest spread, or the current one if the gain is small."""
    best = min(seconds, key=lambda spread: seconds[spread])
    return best if seconds[best] < (1 - MIN_GAIN) * seconds[current] else current


class MoeAutotuner:
    """Chooses the spread of each MoE layer of this pipeline rank by its load."""

    def __init__(self, model: Transformer):
        self.model, self.costs, self.timings = model, MeasuredCosts.measured(model), SpreadTimings(model)
        self.spread = [DispatchOptions()] * model.config.total_layers
        """By block number."""

    def update(self, layers: Sequence[int], loads: Sequence[Sequence[int]], micro_batches: int) -> list[str]:
        """Choose again from a step's ``loads`` over all ranks and ``micro_batches``; a line of text for each change."""
        grid, changes = self.model.axes.experts, []
        modules = dict(_moe_layers(self.model))
        for number, load in zip(layers, loads, strict=True):
            module, current = modules[number], self.spread[number]
            layer = _layer_load(module, load, grid, micro_batches)
            spreads = candidates(current, layer, self.costs)
            if len(spreads) == 1 or not sum(load):
                continue
            seconds = self.timings.seconds(spreads, module, round(layer.choices / module.moe.active), load)
            best = pick_spread(current, seconds)
            if best != current:
                changes.append(
                    f"layer {number}: adaptive_r {current.adaptive_r} -> {best.adaptive_r}, "
                    f"overlap {current.overlap} -> {best.overlap} "
                    f"({seconds[current] * 1e3:.2f} -> {seconds[best] * 1e3:.2f} ms, measured)"
                )
                self.spread[number] = best
        return changes


def _layer_load(module: MixtureOfExperts, load: Sequence[int], grid: ExpertAxes, micro_batches: int) -> LayerLoad:
    experts, each = module.experts, module.experts.count // grid.ep.size
    # Copies of the experts divide the load among them.
    groups = grid.copies.size * micro_batches
    by_rank = [sum(load[i : i + each]) / groups for i in range(0, len(load), each)]
    _, f, D = experts.up.shape
    return LayerLoad(
        ep=grid.ep.size,
        etp=grid.etp.size,
        choices=sum(by_rank) / grid.all.size,
        busiest=max(by_rank),
        token_bytes=D * experts.up.itemsize,
        weight_bytes=experts.size_bytes,
        flops=2.0 * math.prod((len(experts.matrices), f * grid.etp.size, D)),
    )


def has_moe_layers(model: Transformer) -> bool:
    """Whether this pipeline rank has MoE layers."""
    return bool(_moe_layers(model))


def _moe_layers(model: Transformer) -> list[tuple[int, MixtureOfExperts]]:
    modules = [(int(name), block.get_submodule("ffn")) for name, block in model.blocks.named_children()]
    encoder = enumerate(model.encoder_blocks.children(), model.config.layers)
    modules += [(number, block.get_submodule("ffn")) for number, block in encoder]
    return [(number, ffn) for number, ffn in modules if isinstance(ffn, MixtureOfExperts)]
