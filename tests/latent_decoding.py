"""Test cases of paged latent attention: inputs, plan, the kernel's result and the exact one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.kernels.attention import cache_write, split_planner, triton_mla_decode
from colonnade.kernels.attention.decode_plan import DevicePlan, KernelLayout, Kernels
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import Costs
from colonnade.kernels.softmax_state import State
from tests.decoding import Case, guarded_plan, guarded_table, reference_state
from tests.guard_pages import guarded


@dataclass
class LatentTensors:
    """The tensors and plan of a case."""

    q: Tensor
    k: Tensor
    rank: int
    table: PageTable
    layout: KernelLayout
    ready: DevicePlan
    scales: Tensor | None = None

    def run(self) -> State:
        """The kernel's result; outputs start as NaN, and on a CPU inputs are in guarded memory."""
        q, k, scales = guarded(self.q), guarded(self.k), None if self.scales is None else guarded(self.scales)
        table, ready = guarded_table(self.table), guarded_plan(self.ready)
        torch.use_deterministic_algorithms(True)
        try:
            return triton_mla_decode.attend(q, k, self.rank, table, ready, scales)
        finally:
            torch.use_deterministic_algorithms(False)

    def exact(self) -> State:
        """The reference's result in float64."""
        k = self.k.double()
        if self.scales is not None:
            k = cache_write.dequantise_latents(self.k, self.scales, self.rank, torch.float64)
        return reference_state(self.q.double(), k, k[..., : self.rank], self.table, self.layout.shape.window)


@dataclass(frozen=True)
class LatentCase:
    """Requests of ``lengths`` tokens, of which the last ``queries`` are new."""

    lengths: list[int]
    queries: list[int]
    N: int
    rank: int
    rope: int
    page: int
    window: int | None = None
    chunk: int | None = None
    dtype: torch.dtype = torch.float32
    cache: cache_write.LatentKind | None = None
    kernels: Kernels = "auto"

    def made(self, device: str = "cpu") -> LatentTensors:
        """Tensors and a plan with many splits."""
        H = self.rank + self.rope
        case = Case(self.lengths, self.queries, K=1, group=self.N, H=H, page=self.page, dtype=self.dtype)
        raw = case.made(device, prepared=False)
        k, scales = raw.k, None
        if self.cache is not None:
            k, scales = cache_write.quantise_latents(k.flatten(0, 2), self.rank, self.cache)
            k, scales = k.view(raw.k.shape), scales.view(*raw.k.shape[:2], 2)
        layout = KernelLayout.for_mla(
            raw.q, k, max(self.queries), rank=self.rank, window=self.window, chunk=self.chunk, kernels=self.kernels
        )
        cheap = Costs(tile=1000, start=10, merge=0, part=0)
        plan = split_planner.plan(self.lengths, self.queries, layout.shape, layout.workers, cheap, chunk=layout.chunk)
        return LatentTensors(raw.q, k, self.rank, raw.table, layout, layout.prepare(plan, device), scales)
