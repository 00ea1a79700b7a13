"""Paged-decoding test cases: inputs, plan, the kernels' result and the exact one; interpreted or on a GPU."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from colonnade.kernels.attention import cascade, reference, split_planner, triton_decode
from colonnade.kernels.attention.cascade import Cascade, KernelCosts
from colonnade.kernels.attention.decode_plan import DevicePlan, KernelLayout, Kernels
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import Costs, Plan
from colonnade.kernels.softmax_state import State
from tests.guard_pages import guarded

KERNELS: list[Kernels] = ["auto"]
"""The kernel for requests of few rows; tests of cases that it does not support are skipped."""


def scaled(x_PpKH: Tensor, scale_K: Tensor | None) -> Tensor:
    """The cache's values, dequantised if it has scales."""
    return x_PpKH if scale_K is None else x_PpKH.double() * scale_K.double()[:, None]


def guarded_table(table: PageTable) -> PageTable:
    """A copy of the table whose tensors are in guarded memory."""
    pages_RP, cu_queries, lengths_R = map(guarded, (table.pages_RP, table.cu_queries, table.lengths_R))
    return replace(table, pages_RP=pages_RP, cu_queries=cu_queries, lengths_R=lengths_R)


def guarded_plan(ready: DevicePlan) -> DevicePlan:
    """A copy of the plan, and of its groups' plan, in guarded memory."""
    shared = ready.shared
    if shared is not None:
        shared = replace(shared, ready=guarded_plan(shared.ready), members=guarded(shared.members))
    return replace(ready, flat=guarded(ready.flat), shared=shared)


@dataclass
class CaseTensors:
    """The tensors and plan of a case."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: PageTable
    layout: KernelLayout
    plan: Plan | Cascade | None
    ready: DevicePlan | None
    options: dict
    scales: tuple[Tensor, Tensor] | None

    def run(self) -> State:
        """The kernels' result; outputs start as NaN, and on a CPU inputs are in guarded memory."""
        q, k, v = map(guarded, (self.q, self.k, self.v))
        table, ready = guarded_table(self.table), guarded_plan(self.ready)
        # Makes torch fill uninitialised memory with NaN.
        torch.use_deterministic_algorithms(True)
        try:
            return triton_decode.attend(q, k, v, table, ready, scales_K=self.scales, **self.options)
        finally:
            torch.use_deterministic_algorithms(False)

    def exact(self) -> State:
        """The reference's result in float64."""
        scales = self.scales or (None, None)
        k, v = (scaled(x, scale).double() for x, scale in zip((self.k, self.v), scales, strict=True))
        return reference_state(self.q.double(), k, v, self.table, self.layout.shape.window, **self.options)


def attend_alone(made: CaseTensors, t: int, ahead: int = 0) -> State:
    """The result for query t of the only request of ``made`` as the only query, with a plan made ``ahead``."""
    (new,), (length,) = made.table.host_lengths
    length += t + 1 - new

    def number(*x: int) -> Tensor:
        return torch.tensor(x, dtype=torch.int32, device=made.q.device)

    table = replace(
        made.table, cu_queries=number(0, 1), lengths_R=number(length), longest_query=1, longest_context=length
    )
    q, layout = made.q[t : t + 1], made.layout
    if layout.aligned:
        layout = KernelLayout.of(q, made.k, 1, window=layout.shape.window, chunk=layout.chunk, kernels=KERNELS[0])
    ready = layout.prepare(layout.plan([length], [1], ahead=ahead), made.q.device)
    return replace(made, q=q, table=table, layout=layout, ready=ready).run()


def all_codes_case(cache: torch.dtype, dtype: torch.dtype, device: str = "cpu") -> CaseTensors:
    """Each finite value of a format as a key and as a value: four requests of one key, one head per element.

    With zero queries the output is the row of values, bitwise. Here query n is 64 at element n, so that head n's
    log-sum-exp is 8 times that element.
    """
    made = Case([1] * 4, [1] * 4, K=1, group=64, H=64, page=16, dtype=dtype, cache=cache).made(device)
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(cache)
    codes = torch.where(codes.float().isfinite(), codes.float(), 0.0).to(cache).view(4, 1, 64)
    for x in (made.k, made.v):
        x[made.table.pages_RP[:, 0].long(), 0] = codes
    made.q[:] = 64 * torch.eye(64, dtype=dtype, device=device)
    made.scales = (torch.ones(1, device=device), torch.ones(1, device=device))
    return made


def extreme_queries(case: "Case", device: str = "cpu") -> CaseTensors:
    """Check ``case``, four heads in one group, with queries above and below float16's range and zero."""
    made = case.made(device)
    for n, times in enumerate((1.0, 0.0, 2.0**-100, 2.0**18)):
        made.q[:, n] *= times
    state, exact = made.run(), made.exact()
    for n in range(4):
        for got, right in zip(state, exact, strict=True):
            assert (got[:, n].double() - right[:, n]).norm() < 4e-3 * right[:, n].norm(), n
    return made


def reference_state(q, k, v, table: PageTable, window, *, cap=None, slopes_N=None, sinks_N=None, near_RN=None) -> State:
    """:func:`reference.paged` that also returns the log-sum-exp."""
    ends, (_, lengths) = table.cu_queries.tolist(), table.host_lengths
    parts = []
    for r, length in enumerate(lengths):
        used = table.pages_RP[r, : -(-length // table.page_tokens)].long()
        keys, values = (x[used].flatten(0, 1)[:length] for x in (k, v))
        mods = {"window": window, "cap": cap, "slopes_N": slopes_N, "near_RN": near_RN}
        part = reference.attend(q[ends[r] : ends[r + 1]], keys, values, **mods)
        parts.append(part if sinks_N is None else reference.with_sinks(part, sinks_N))
    return State(torch.cat([part.o for part in parts]), torch.cat([part.lse for part in parts]))


@dataclass(frozen=True)
class Case:
    """Requests of ``lengths`` tokens, of which the last ``queries`` are new."""

    lengths: list[int]
    queries: list[int]
    K: int
    group: int
    H: int
    page: int
    window: int | None = None
    cap: float | None = None
    slopes: bool = False
    sinks: bool = False
    near: int = 0
    """Distance of relative biases; 0: none."""
    chunk: int | None = None
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    many: bool = False
    """Whether to use the kernel for many rows."""
    prefixes: tuple[tuple[tuple[int, ...], int], ...] = ()
    """(members, keys): requests that share their first keys, whole pages, with the first member."""

    def made(
        self, device: str = "cpu", *, ahead: int = 0, capacity: bool = False, prepared: bool = True
    ) -> CaseTensors:
        """Tensors and a plan; pages are shuffled, and unused cache entries are NaN where the dtype has it."""
        needed = [-(-n // self.page) for n in self.lengths]
        N, P = self.K * self.group, sum(needed) + 2
        order = torch.randperm(P, generator=torch.Generator().manual_seed(P)).int()
        pages = torch.zeros(len(needed), max(1, *needed), dtype=torch.int32)
        q = torch.empty(sum(self.queries), N, self.H)
        pools = torch.full((2, P, self.page, self.K, self.H), torch.nan)
        for r in range(len(needed)):
            # A generator per request, so that its values do not depend on the batch.
            draw = torch.Generator().manual_seed(self.lengths[r] + 1000 * self.queries[r])
            start, new, length = sum(self.queries[:r]), self.queries[r], self.lengths[r]
            q[start : start + new] = torch.randn(new, N, self.H, generator=draw)
            mine = order[sum(needed[:r]) : sum(needed[: r + 1])]
            pages[r, : len(mine)] = mine
            drawn = torch.randn(2, length, self.K, self.H, generator=draw)
            at = torch.arange(length)
            pools[:, mine.long()[at // self.page], at % self.page] = drawn
        k, v, scales = *pools, None
        for members, keys in self.prefixes:
            pages[list(members), : keys // self.page] = pages[members[0], : keys // self.page].clone()
        if self.cache is not None:
            # Well away from 1, so that ignoring a scale shows.
            scales = tuple(torch.linspace(low, 2 * low, self.K, device=device) for low in (0.02, 0.03))
            k, v = (
                (x.nan_to_num() / scale.cpu()[:, None]).clamp(-127, 127).to(self.cache)
                for x, scale in zip((k, v), scales, strict=True)
            )
        else:
            k, v = k.to(self.dtype), v.to(self.dtype)
        q, k, v = (x.to(device) for x in (q.to(self.dtype), k, v))
        cu = torch.tensor([0, *self.queries], device=device).cumsum(0).int()
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        table = PageTable(pages.to(device), cu, lengths, self.page, max(self.queries), max(self.lengths))
        options = {
            "cap": self.cap,
            "slopes_N": torch.linspace(0.01, 0.3, N, device=device) if self.slopes else None,
            "sinks_N": torch.linspace(-3, 3, N, device=device) if self.sinks else None,
            "near_RN": torch.linspace(-2, 2, (2 * self.near + 1) * N, device=device).sin().view(-1, N)
            if self.near
            else None,
        }
        if not prepared:
            return CaseTensors(q, k, v, table, None, None, None, options, scales)
        longest = max(self.queries)
        if self.many:
            layout = KernelLayout.for_prefill(q, k, window=self.window)
        else:
            how = {"window": self.window, "chunk": self.chunk, "shares": bool(self.prefixes)}
            try:
                kernels = "triton" if self.near else KERNELS[0]
                layout = KernelLayout.of(q, k, longest, **how, kernels=kernels)
            except LookupError as why:
                pytest.skip(str(why))
        # Costs at which everything that can be split is split; with the true ones cases this small would not be. Fixed
        # splits always apply, and then chunks are read in runs.
        cheap = Costs(tile=1000, start=8000 if self.chunk else 10, merge=0, part=0)
        if layout.shared is not None:
            few = KernelCosts(layout.shape, layout.workers, cheap)
            # Cheaper still, so that every request that can join a group does.
            many = KernelCosts(layout.shared.shape, layout.shared.workers, Costs(tile=2, start=1, merge=0, part=0))
            plan = cascade.plan(pages.tolist(), self.lengths, self.queries, self.page, few, many, ahead=ahead)
        else:
            plan = split_planner.plan(
                self.lengths, self.queries, layout.shape, layout.workers, cheap,
                chunk=layout.chunk, runs=layout.runs, aligned=layout.aligned, ahead=ahead, teams=layout.teams,
            )  # fmt: skip
        size, shared_size = None, None
        if capacity:
            size = layout.capacity(len(needed) + 1, longest, max(self.lengths) + ahead)
            shared_size = layout.shared_capacity(len(needed) + 1, longest) if layout.shared else None
        ready = layout.prepare(plan, device, size, shared_size)
        return CaseTensors(q, k, v, table, layout, plan, ready, options, scales)
