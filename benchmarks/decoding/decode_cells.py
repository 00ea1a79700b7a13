"""Decode attention cells for benchmarks/flash_decoding.py: tensors, our kernels, the peers, and timing.

A CUDA graph of several calls is timed, each call on another copy of the KV cache, so that no call finds its keys in the
L2 cache; the time is per call. Copies together have at least :data:`COLD_BYTES`, with at most :data:`CALLS` copies (a
cache of a few KB is not cold in a server either).
"""

import functools
import importlib
import importlib.util
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from colonnade.bench import ceilings
from colonnade.kernels.attention import cuda_decode, reference, triton_decode
from colonnade.kernels.attention.decode_plan import KernelLayout, Kernels
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.softmax_state import State

COLD_BYTES, CALLS = 2**28, 256
WARM_S = 0.02
"""Warm-up time: after idling during compilation, a GPU starts at a low clock."""
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
WORKSPACE_BYTES = 2**29
"""FlashInfer's workspace for partial results, larger than in servers."""
FAILURES = (OSError, ImportError, ValueError, LookupError, AssertionError)
"""Exceptions of FlashInfer, besides RuntimeError, if its compiler is missing or a cell is unsupported."""
Run = Callable[[int], Any]
"""One call, on the copy of the cache with that number."""


@dataclass(frozen=True)
class Cell:
    """Requests with these numbers of keys, one new query each."""

    lengths: tuple[int, ...]
    K: int = 2
    group: int = 8
    H: int = 128
    page: int = 256
    dtype: torch.dtype = torch.float16
    kind: str = "uniform"

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that must be read."""
        return 2 * sum(self.lengths) * self.K * self.H * self.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes of a contiguous cache, padded to the longest request in whole pages."""
        longest = -(-max(self.lengths) // self.page) * self.page
        return 2 * len(self.lengths) * longest * self.K * self.H * self.dtype.itemsize

    @property
    def name(self) -> str:
        return f"B={len(self.lengths)} S={max(self.lengths)}"


class Tensors:
    """A cell's queries and copies of its cache: contiguous for the peers; the same memory, as pages, for us."""

    def __init__(self, cell: Cell, device: str, copies: int | None = None) -> None:
        self.cell, self.device = cell, device
        self.copies = copies or 1
        if device == "cuda" and copies is None:
            fit = int(0.7 * torch.cuda.mem_get_info()[0]) // cell.held_bytes
            self.copies = max(1, min(CALLS, -(-COLD_BYTES // cell.bytes), fit))
        B, pages = len(cell.lengths), -(-max(cell.lengths) // cell.page)
        draw = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=cell.dtype).normal_(generator=draw)

        self.q_BNH = drawn(B, cell.K * cell.group, cell.H)
        self.k, self.v = (drawn(self.copies, B, pages * cell.page, cell.K, cell.H) for _ in range(2))
        self.pages = torch.arange(self.copies * B * pages, device=device, dtype=torch.int32).view(self.copies, B, pages)
        # Pages of a copy in random order, as in the pool of a long-running server.
        order = torch.randperm(B * pages, device=device, generator=draw)
        self.scattered = self.pages.flatten(1)[:, order].view_as(self.pages)

    def table(self, copy: int, pages: Tensor) -> PageTable:
        B, lengths = len(self.cell.lengths), self.cell.lengths
        cu = torch.arange(B + 1, device=self.device, dtype=torch.int32)
        lengths_R = torch.tensor(lengths, device=self.device, dtype=torch.int32)
        return PageTable(pages[copy], cu, lengths_R, self.cell.page, 1, max(lengths))


def ours(tensors: Tensors, *, chunk: int | None = None, in_order: bool = False, kernels: Kernels = "auto") -> Run:
    """Our kernels; on a CPU the plain executor of the same plan."""
    cell = tensors.cell
    k, v = (x.flatten(0, 2).unflatten(0, (-1, cell.page)) for x in (tensors.k, tensors.v))
    layout = KernelLayout.of(tensors.q_BNH, k, 1, chunk=chunk, kernels=kernels)
    plan = layout.plan(cell.lengths, [1] * len(cell.lengths))
    pages = tensors.pages if in_order else tensors.scattered
    tables = [tensors.table(copy, pages) for copy in range(tensors.copies)]
    if tensors.device == "cpu":
        return lambda copy: reference.run_plan(plan, layout.shape, tensors.q_BNH, k, v, tables[copy]).o
    ready = layout.prepare(plan, tensors.device)
    return lambda copy: triton_decode.attend(tensors.q_BNH, k, v, tables[copy], ready).o


def loads_only(tensors: Tensors) -> Run | None:
    """The loads of our kernel in CUDA C++ without its arithmetic; None where that kernel does not read this cell."""
    cell, q_BNH = tensors.cell, tensors.q_BNH
    k, v = (x.flatten(0, 2).unflatten(0, (-1, cell.page)) for x in (tensors.k, tensors.v))
    layout = KernelLayout.of(q_BNH, k, 1)
    if not layout.cuda:
        return None
    tables = [tensors.table(copy, tensors.scattered) for copy in range(tensors.copies)]
    ready = layout.prepare(layout.plan(cell.lengths, [1] * len(cell.lengths)), tensors.device)
    state, mods = State(torch.empty_like(q_BNH), q_BNH.new_empty(q_BNH.shape[:2], dtype=torch.float32)), (None,) * 6
    return lambda copy: cuda_decode.attend(q_BNH, k, v, state, None, tables[copy], ready, mods, compute=False)


def peers(tensors: Tensors, *, flex: bool = False) -> Iterator[tuple[str, Run]]:
    """(name, call): eager, SDPA's backends with grouped heads, and with the heads of a group as rows of one;
    FlashInfer if installed; flex.
    """
    cell = tensors.cell
    q, S = tensors.q_BNH, max(cell.lengths)
    q_BKGH = q.unflatten(1, (cell.K, cell.group))
    mask = None
    if cell.kind != "uniform":
        lengths = torch.tensor(cell.lengths, device=q.device)
        mask = (torch.arange(S, device=q.device) < lengths[:, None])[:, None, None]

    def cache(copy: int) -> tuple[Tensor, Tensor]:
        return tensors.k[copy, :, :S].transpose(1, 2), tensors.v[copy, :, :S].transpose(1, 2)

    def eager(copy: int) -> Tensor:
        k_BKSH, v_BKSH = cache(copy)
        s_BKGS = q_BKGH @ k_BKSH.transpose(2, 3) * cell.H**-0.5
        s_BKGS = s_BKGS if mask is None else s_BKGS.masked_fill(~mask, -torch.inf)
        return (s_BKGS.softmax(-1) @ v_BKSH).flatten(1, 2)

    def sdpa(backend: SDPBackend, *, grouped: bool) -> Run:
        def run(copy: int) -> Tensor:
            with sdpa_kernel(backend):
                if grouped:
                    o = scaled_dot_product_attention(q[:, :, None], *cache(copy), attn_mask=mask, enable_gqa=True)
                    return o[:, :, 0]
                return scaled_dot_product_attention(q_BKGH, *cache(copy), attn_mask=mask).flatten(1, 2)

        return run

    yield "eager", eager
    for name, backend in BACKENDS.items():
        yield f"sdpa {name}", sdpa(backend, grouped=True)
        if cell.group > 1:
            yield f"sdpa {name}, heads as rows", sdpa(backend, grouped=False)
    yield from flashinfer(tensors)
    if flex and mask is None:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention)
        yield "flex_attention", lambda copy: compiled(q[:, :, None], *cache(copy), enable_gqa=True)[:, :, 0]


def flashinfer(tensors: Tensors, *, in_order: bool = False) -> Iterator[tuple[str, Run]]:
    """FlashInfer, if installed, on the same pages as ours: on CUDA cores and on tensor cores, planned for
    these lengths alone, and in the mode whose graphs hold for later lengths too.

    A call that is unsupported or does not compile raises RuntimeError; the first call compiles and plans.
    """
    if importlib.util.find_spec("flashinfer") is None:
        return
    cell, q_BNH = tensors.cell, tensors.q_BNH
    # All copies have the same relative page ids, so one plan serves all.
    k, v = (x.flatten(1, 2).unflatten(1, (-1, cell.page)) for x in (tensors.k, tensors.v))
    lists = page_lists(cell.lengths, (tensors.pages if in_order else tensors.scattered)[0], cell.page)

    # Calls run one after another, so one workspace is enough.
    workspace = functools.cache(lambda: torch.empty(WORKSPACE_BYTES, device=q_BNH.device, dtype=torch.uint8))

    @functools.cache
    def planned(tensor_cores: bool, graphs: bool) -> Any:
        # Buffers for later plans, needed only with CUDA graphs.
        names = [f"paged_kv_{what}_buffer" for what in ("indptr", "indices", "last_page_len")] if graphs else []
        wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
            workspace(),
            "NHD",
            use_tensor_cores=tensor_cores,
            use_cuda_graph=graphs,
            **{name: value.to(q_BNH.device) for name, value in zip(names, lists, strict=False)},
        )
        heads = q_BNH.shape[1], cell.K, cell.H
        wrapper.plan(*lists, *heads, cell.page, q_data_type=cell.dtype, kv_data_type=cell.dtype)
        return wrapper

    def call(tensor_cores: bool, graphs: bool) -> Run:
        def run(copy: int) -> Tensor:
            try:
                return planned(tensor_cores, graphs).run(q_BNH, (k[copy], v[copy]))
            except FAILURES as why:
                raise RuntimeError(f"{type(why).__name__}: {why}") from why

        return run

    for graphs, tensor_cores in itertools.product((False, True), repeat=2):
        name = "flashinfer" + ", tensor cores" * tensor_cores + ", graph mode" * graphs
        yield name, call(tensor_cores, graphs)


def page_lists(lengths: Sequence[int], pages_BP: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's description of a cache, int32 on the CPU: page offsets of the requests (``B + 1``), page ids of all
    requests, and the number of tokens in each request's last page.
    """
    lengths_B = torch.tensor(lengths, dtype=torch.int32)
    counts_B = (lengths_B + page - 1) // page
    cu_pages_B1 = torch.nn.functional.pad(counts_B.cumsum(0, dtype=torch.int32), (1, 0))
    held_BP = torch.arange(pages_BP.shape[1]) < counts_B[:, None]
    return cu_pages_B1, pages_BP.cpu()[held_BP], lengths_B - (counts_B - 1) * page


def reference_output(tensors: Tensors) -> Tensor:
    """o_BNH of the first copy in float32."""
    cell, parts = tensors.cell, []
    for r, length in enumerate(cell.lengths):
        q_KGH = tensors.q_BNH[r].float().unflatten(0, (cell.K, cell.group))
        k_KSH, v_KSH = (x[0, r, :length].float().transpose(0, 1) for x in (tensors.k, tensors.v))
        parts.append(((q_KGH @ k_KSH.transpose(1, 2) * cell.H**-0.5).softmax(-1) @ v_KSH).flatten(0, 1))
    return torch.stack(parts)


def relative_error(run: Run, right: Tensor) -> float:
    """Relative error of a call on the first copy, by norm."""
    return float((run(0).float() - right).norm() / right.norm())


def cell_seconds(run: Run, tensors: Tensors, *, rounds: int = 15, at_most: float = math.inf) -> float:
    """Seconds per call on the cell's copies."""
    return graph_seconds(run, tensors.copies, tensors.device, rounds=rounds, at_most=at_most)


def graph_seconds(run: Run, copies: int, device: str, *, rounds: int = 15, at_most: float = math.inf) -> float:
    """Seconds of one call, the median of ``rounds`` replays of a graph of calls, on so many copies in turn; on a CPU of
    calls. If the first replay takes longer than ``at_most`` it is the only one.
    """
    if device == "cpu":

        def once() -> float:
            began = time.perf_counter()
            run(0)
            return time.perf_counter() - began

        return statistics.median(once() for _ in range(3))
    # A graph of one call is mostly launch overhead: use at least eight, repeating copies that exceed the cache.
    calls = max(copies, 8)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(0)
        run(copies - 1)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(call % copies)
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_S:
        graph.replay()
        torch.cuda.synchronize()
    taken: list[float] = []
    for _ in range(rounds):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        taken.append(first.elapsed_time(last) / 1e3 / calls)
        if taken[0] > at_most:
            break
    return statistics.median(taken)


def read_bandwidth(device: str, *, gigabytes: float = 4) -> float:
    """Read bandwidth in bytes/s; on a CPU, where sizes are toys, of a small buffer."""
    return ceilings.read_bandwidth(device, int(gigabytes * 2**30) if device == "cuda" else 2**18, budget_s=0.5)
