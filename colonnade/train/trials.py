"""How long a layer of experts takes, tried: forward and backward, on random tokens and weights, at a given load.

Every rank draws its tokens' experts by the load of all ranks, so that each expert has its share of rows, and the
slowest rank counts: all know the same numbers and decide alike. Loads that are about as skewed, and about as many
tokens, are tried once a run: a trial takes as long as some steps of one layer.
"""

import math
from collections.abc import Sequence

import torch

from colonnade.model import Transformer
from colonnade.model.moe import MixtureOfExperts, Spread
from colonnade.model.moe.dispatch import through_experts
from colonnade.model.moe.experts import Experts
from colonnade.parallel import measure

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
        ep = self.model.axes.grid.ep.size
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
        draw = torch.Generator(like.device).manual_seed(axes.grid.tokens.rank)
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
            y_tD, _ = through_experts(x_tD, ids_tA, weights_tA, experts, axes.grid, way)
            torch.autograd.grad(y_tD, inputs, y_tD.detach(), allow_unused=True)

        return [measure.rate(lambda way=way: run(way), like.device, axes.grid.tokens) for way in ways]
