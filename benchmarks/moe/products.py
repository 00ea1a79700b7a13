"""A layer of experts whose GEMMs run one by one, and candidate tiles for each, for tune_experts.py."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.kernels.experts import triton_products as products
from colonnade.kernels.experts.tiles import GroupedTiles, Kernel
from colonnade.kernels.registry import choose

FORWARD: tuple[Kernel, ...] = ("gated_up", "down")
BACKWARD: tuple[Kernel, ...] = ("hidden_dgrad", "input_dgrad", "gated_wgrad", "wgrad")

DECODE = 256
"""Steps of up to this many tokens have no backward."""


class Sizes(NamedTuple):
    """Sizes of a gated layer and its number of tokens."""

    E: int
    A: int
    D: int
    F: int
    T: int

    def small(self) -> "Sizes":
        """Smaller sizes with the same Triton kernels, which are specialised on divisibility only."""
        D, F = (512 + width % 256 for width in (self.D, self.F))
        return Sizes(self.E, self.A, D, F, min(self.T, 2 * DECODE))

    @property
    def mean(self) -> float:
        """Mean rows per expert."""
        return self.T * self.A / self.E


class Layer:
    """The GEMMs of one layer, forward and backward, each on its own inputs."""

    def __init__(self, sizes: Sizes, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        E, A, D, F, T = sizes
        draw = torch.Generator(device).manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype).normal_(0, scale, generator=draw)

        # These standard deviations keep the results of all GEMMs near 1.
        self.up, self.gate = (random(E, F, D, scale=D**-0.5) for _ in range(2))
        self.down = random(E, F, D, scale=F**-0.5)
        self.x, self.dy = random(T, D), random(T, D)
        self.back = T > DECODE
        R = T * A
        self.h = random(R, F)
        self.a, self.u, self.du, self.da = (random(R, F) for _ in range(4)) if self.back else (self.h,) * 4
        scores_TE = torch.rand(T, E, device=device, generator=draw)
        ids_TA = scores_TE.topk(A).indices
        self.routing = torch.rand(T, A, device=device, generator=draw)
        self.order, self.ends = choose("sort_by_expert", device, dtype)(ids_TA, E)

    def run(self, kernel: Kernel) -> list[Tensor]:
        """Run one GEMM with the tiles of the table or its overrides."""
        route = products.RoutedRows(self.order, self.ends, self.routing)
        if kernel == "gated_up":
            outputs = products.up_forward(route, self.x, self.up, self.gate, None, None, "silu", keep=self.back)
        elif kernel == "down":
            outputs = (products.down_forward(route, self.h, self.down, None),)
        elif kernel == "hidden_dgrad":
            outputs = products.hidden_dgrad(route, self.dy, self.down, self.a, self.u, "silu")
        elif kernel == "input_dgrad":
            outputs = (products.input_dgrad(route, self.du, self.da, self.up, self.gate),)
        elif kernel == "gated_wgrad":
            outputs = products.wgrad(route, self.du, self.da, self.x)
        else:
            if self.gathered_before:
                route.cache_gathered(self.dy, self.gathered_dy())
            outputs = products.wgrad(route, self.h, None, self.dy)
        return [it for it in outputs if it is not None]

    gathered_before = False
    """Whether the preceding GEMM has already gathered dy."""
    _dy_RD: Tensor | None = None

    def gathered_dy(self) -> Tensor:
        if self._dy_RD is None:
            self._dy_RD = products.RoutedRows(self.order, self.ends, self.routing).gather(self.dy)
        return self._dy_RD


def candidates(kernel: Kernel, sizes: Sizes) -> list[GroupedTiles]:
    """Promising tiles for this GPU: see ``tiles.py`` and ``triton_wgrad.py``."""
    found: list[GroupedTiles] = []
    if kernel in ("wgrad", "gated_wgrad"):
        if kernel == "wgrad":
            shapes = [(128, 256, 64, 8), (256, 128, 64, 8), (128, 128, 64, 4), (128, 256, 128, 8)]
        else:
            shapes = [(128, 128, 64, 8), (64, 256, 64, 8), (128, 64, 64, 4), (64, 128, 64, 4), (128, 128, 128, 8)]
        for *shape, warps in shapes:
            deep = shape[2] == 128
            for stages in (2,) if deep else (3, 4):
                found += [
                    GroupedTiles(*shape, warps, stages, descriptors=tma, gather_first=True) for tma in (True, False)
                ]
            if not deep:  # token ids are loaded before their rows: twice the stages for as many rows in flight
                found += [
                    GroupedTiles(*shape, warps, stages, descriptors=tma) for stages in (5, 7) for tma in (True, False)
                ]
        return found
    if sizes.T > DECODE:
        shapes = [(128, 256, 64, 8), (256, 128, 64, 8), (128, 128, 64, 4), (128, 128, 64, 8)]
        # Only token rows need a gather; other rows are in expert order already.
        gathers = (False, True) if kernel in ("gated_up", "hidden_dgrad") else (False,)
        ways = [(0, False, False), (1, False, False)]
        ways += [(stay, True, gather) for stay in (0, 1) for gather in gathers]
        shapes = [(*shape, stages) for shape in shapes for stages in (3, 4)]
    else:
        least = max(16, 1 << (math.ceil(sizes.mean) - 1).bit_length())
        low = (least,) if sizes.mean <= 4 else (least, 2 * least)  # some experts have more rows than the mean
        shapes = [
            (m, n, k, 4, stages)
            for m in low
            for n in (32, 64, 128)
            for k, stages in ((64, 5), (128, 3), (128, 5), (256, 3))
            if (m + n * (1 + (kernel == "gated_up")) // 2) * k * stages * 2 <= 200 * 1024
        ]
        ways = [(0, tma, False) for tma in (False, True)]
    if kernel == "input_dgrad" and sizes.T > DECODE:
        both = [
            (128, 256, 64, 8, 2),
            (128, 256, 32, 8, 3),
            (128, 256, 32, 8, 4),
            (256, 128, 32, 8, 4),
            (128, 128, 32, 4, 3),
        ]
        found += [
            GroupedTiles(*shape, 8, stay, tma, interleaved=True)
            for shape in both
            for stay in (0, 1)
            for tma in (False, True)
        ]
    if kernel == "gated_up":  # two accumulators: half the columns
        shapes = sorted({(m, max(n // 2, 16), *rest) for m, n, *rest in shapes}, reverse=True)
    return [GroupedTiles(*shape, 8, *way) for shape in shapes for way in ways] + found
