"""How long a layer of experts takes, tried: forward and backward, on random tokens and weights, at a given load.

Every rank draws its tokens' experts by the load of all ranks, so that each expert has its share of rows, and the
slowest rank counts: all know the same numbers and decide alike. Loads that are about as skewed, and about as many
tokens, are tried once a run: a trial takes as long as some steps of one layer.

Which degree r and overlap p each layer of experts works at: from measured links and the load that it really has.

What a step costs at (r, p), forward and backward, on the slowest rank; b are the bytes of this rank's shares of the
weights, c those of a token, W = ep·sh ranks, n the choices of a rank's tokens, m the busiest ep rank's:

    r = 0    3 · gather(b·(W − 1))                                         + compute(n)
    r ≥ 1    3p · gather(b·(sh/r − 1)) + 4 · exchange(c·n·r·(W − 1)/W)     + compute(m/sh)

p parts hide the shorter of exchange and compute but for the share of the first part, which is smaller than 1/p
(:func:`colonnade.model.moe.dispatch.shares`), and pay the exchange's latency p times. (Tutel, arXiv 2206.03382, section
4.1, chooses by 2P against 4·C_g·r + 2P/(E·r) bytes; here bytes become seconds by what this machine was measured to do,
and the load counts, which at r = 0 alone is even by itself.)

The formula knows nothing of launches, of products that slow down while rows travel, or of small ones. So the ways that
it holds for nearly the best are tried, at this load, and the one that took least is taken
(:mod:`colonnade.train.moe_autotune`). A change must promise a thirtieth of the time,
or noise would make it go to and fro.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from colonnade.config.model import divisors
from colonnade.model import Transformer
from colonnade.model.moe import MixtureOfExperts, Spread
from colonnade.model.moe.dispatch import shares, through_experts
from colonnade.model.moe.experts import Experts
from colonnade.parallel import link_bandwidth
from colonnade.parallel.axis import ExpertAxes
from colonnade.parallel.link_bandwidth import Link

STEP = 1.25
"""Loads and numbers of tokens that differ by less than this factor are one."""


class Trials:
    """What was tried, by load."""

    def __init__(self, model: Transformer):
        self.model = model
        self._took: dict[tuple[int, int, Spread], float] = {}

    def seconds(
        self, ways: Sequence[Spread], module: MixtureOfExperts, tokens: int, load: Sequence[int]
    ) -> dict[Spread, float]:
        """Of each of ``ways``, for ``tokens`` tokens a rank whose choices fall on the experts as ``load`` says; all
        ranks that share experts must take part.
        """
        ep = self.model.axes.experts.ep.size
        each = len(load) // ep
        busiest = max(sum(load[i : i + each]) for i in range(0, len(load), each)) * ep / sum(load)
        key = round(math.log(max(tokens, 1), STEP)), round(math.log(busiest, STEP))
        missing = [way for way in ways if (*key, way) not in self._took]
        if missing:
            for way, took_s in zip(missing, self._tried(missing, module, tokens, load), strict=True):
                self._took[*key, way] = took_s
        return {way: self._took[*key, way] for way in ways}

    def _tried(self, ways: Sequence[Spread], module: MixtureOfExperts, tokens: int, load: Sequence[int]) -> list[float]:
        axes, moe = self.model.axes, module.moe
        like = module.experts.up
        experts = Experts(self.model.config, moe, axes, device=like.device, dtype=like.dtype)
        experts.float8 = module.experts.float8
        draw = torch.Generator(like.device).manual_seed(axes.experts.tokens.rank)
        with torch.no_grad():
            for w in experts.parameters():
                w.normal_(0, 0.02, generator=draw)
        on = {"device": like.device, "generator": draw}
        x_tD = torch.randn(tokens, like.shape[2], dtype=like.dtype, **on).requires_grad_()
        chance_E = torch.tensor(load, dtype=torch.float32, device=like.device)
        ids_R = torch.multinomial(chance_E, max(1, tokens * moe.active), replacement=True, generator=draw)
        ids_tA = ids_R[: tokens * moe.active].view(tokens, moe.active)
        weights_tA = torch.rand(tokens, moe.active, **on).requires_grad_()
        inputs = [x_tD, weights_tA, *experts.parameters()]

        def run(way: Spread) -> None:
            y_tD, _ = through_experts(x_tD, ids_tA, weights_tA, experts, axes.experts, way)
            torch.autograd.grad(y_tD, inputs, y_tD.detach(), allow_unused=True)

        return [
            link_bandwidth.slowest_seconds(lambda way=way: run(way), like.device, axes.experts.tokens) for way in ways
        ]


GAIN = 0.03
"""The share of a layer's time that a change must promise."""
NEAR = 1.5
"""How many times the least the formula may give a way that is still tried."""
EVERY = 10
"""Steps between two looks at the load."""
OVERLAPS = (1, 2, 3, 4, 6)
ROWS = 256
"""Rows of each expert on which its arithmetic is timed."""


@dataclass(frozen=True)
class Costs:
    """What was measured."""

    exchange: Link
    gathers: dict[int, Link]
    """By degree: laying the shares of the weights together."""
    flops_per_s: float
    """Of the experts' products, forward."""

    @staticmethod
    def measured(model: Transformer) -> "Costs":
        """By trying; all ranks that share experts must take part."""
        grid, layer = model.axes.experts, _layers(model)[0][1]
        device = layer.experts.up.device
        e, f, D = layer.experts.up.shape
        x_RD = torch.randn(e * ROWS, D, device=device, dtype=layer.experts.up.dtype)
        order_R, ends_e = torch.arange(e * ROWS, device=device), torch.arange(1, e + 1, device=device) * ROWS

        @torch.no_grad()
        def products() -> None:
            layer.experts(x_RD, order_R, ends_e, x_RD.new_ones(len(x_RD), 1), layer.experts.weights)

        took_s = link_bandwidth.slowest_seconds(products, device, grid.tokens)
        gathers = {r: link_bandwidth.all_gather_link(grid.hidden_slice(r), device) for r in divisors(grid.sh.size)}
        gathers[0] = link_bandwidth.all_gather_link(grid.all, device)
        flops = 2 * len(layer.experts.matrices) * e * ROWS * f * D
        return Costs(link_bandwidth.all_to_all_link(grid.all, device), gathers, flops / took_s)


@dataclass(frozen=True)
class Layer:
    """What decides one layer's cost."""

    ep: int
    sh: int
    choices: float
    """Of one rank's tokens."""
    busiest: float
    """Choices that the ep rank with most of them has, all its sh ranks together."""
    token_bytes: int
    weight_bytes: int
    """This rank's shares."""
    flops: float
    """Of one choice, forward, all hidden units."""


def seconds(spread: Spread, layer: Layer, costs: Costs) -> float:
    """What one step of ``layer`` costs, as far as ``spread`` decides it."""
    ranks, r = layer.ep * layer.sh, spread.degree
    if r == 0:
        gathered_s = 3 * costs.gathers[0].seconds(layer.weight_bytes * (ranks - 1))
        return gathered_s + 3 * layer.choices * layer.flops / costs.flops_per_s
    others = layer.sh // r - 1
    gathered_s = 3 * spread.overlap * costs.gathers[r].seconds(layer.weight_bytes * others) if others else 0.0
    sent_bytes = layer.token_bytes * layer.choices * r * (ranks - 1) / ranks
    latency_s = 4 * costs.exchange.latency_s * spread.overlap
    exchange_s = 4 * sent_bytes / costs.exchange.bytes_per_s
    compute_s = 3 * layer.busiest / layer.sh * layer.flops / costs.flops_per_s
    hidden_s = (1 - 1 / sum(shares(spread.overlap))) * min(exchange_s, compute_s)
    return gathered_s + latency_s + exchange_s + compute_s - hidden_s


def hopeful(now: Spread, layer: Layer, costs: Costs) -> list[Spread]:
    """The present way, and those that the formula holds for the best or nearly, the best first."""
    ways = [Spread(0, 1)] + [Spread(r, p) for r in divisors(layer.sh) for p in OVERLAPS]
    cost = {way: seconds(way, layer, costs) for way in ways}
    least = min(cost.values())
    near = sorted((way for way in ways if cost[way] <= NEAR * least), key=lambda way: cost[way])
    return [now, *(way for way in near if way != now)]


def better(now: Spread, took_s: Mapping[Spread, float]) -> Spread:
    """The way that took least, or the present one where the gain is small."""
    best = min(took_s, key=lambda way: took_s[way])
    return best if took_s[best] < (1 - GAIN) * took_s[now] else now


class MoeAutotuner:
    """Watches the load and says how each layer of this pipeline rank is to spread its work."""

    def __init__(self, model: Transformer):
        self.model, self.costs, self.trials = model, Costs.measured(model), Trials(model)
        self.spread = [Spread()] * model.config.layers
        """By block number."""

    def look(self, layers: Sequence[int], loads: Sequence[Sequence[int]], micro_batches: int) -> list[str]:
        """Decide anew by a step's ``loads``, over all ranks, in so many micro-batches; what changed, for people."""
        grid, said = self.model.axes.experts, []
        modules = dict(_layers(self.model))
        for number, load in zip(layers, loads, strict=True):
            module, now = modules[number], self.spread[number]
            layer = _described(module, load, grid, micro_batches)
            ways = hopeful(now, layer, self.costs)
            if len(ways) == 1 or not sum(load):
                continue
            took_s = self.trials.seconds(ways, module, round(layer.choices / module.moe.active), load)
            then = better(now, took_s)
            if then != now:
                said.append(
                    f"layer {number}: degree {now.degree} -> {then.degree}, overlap {now.overlap} -> {then.overlap} "
                    f"({took_s[now] * 1e3:.2f} -> {took_s[then] * 1e3:.2f} ms, as tried)"
                )
                self.spread[number] = then
        return said


def _described(module: MixtureOfExperts, load: Sequence[int], grid: ExpertAxes, micro_batches: int) -> Layer:
    experts, each = module.experts, module.moe.experts // grid.ep.size
    # Copies of the experts share the load out among them.
    groups = grid.copies.size * micro_batches
    by_rank = [sum(load[i : i + each]) / groups for i in range(0, len(load), each)]
    _, f, D = experts.up.shape
    return Layer(
        ep=grid.ep.size,
        sh=grid.sh.size,
        choices=sum(by_rank) / grid.all.size,
        busiest=max(by_rank),
        token_bytes=D * experts.up.itemsize,
        weight_bytes=experts.size_bytes,
        flops=2.0 * math.prod((len(experts.matrices), f * grid.sh.size, D)),
    )


def holds_experts(model: Transformer) -> bool:
    """Whether this pipeline rank has layers of experts."""
    return bool(_layers(model))


def _layers(model: Transformer) -> list[tuple[int, MixtureOfExperts]]:
    """The layers with experts of this pipeline rank."""
    found = [(int(name), block.get_submodule("ffn")) for name, block in model.blocks.named_children()]
    return [(number, ffn) for number, ffn in found if isinstance(ffn, MixtureOfExperts)]
