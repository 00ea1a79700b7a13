"""MLA decoding with DeepSeek-V2's latents of 512 + 64 values (benchmarks/flash_decoding.py).

128 heads are a complete layer, 16 are one of eight tensor-parallel ranks. TB/s count each latent read once. SDPA gets
the gathered pages as one key head whose values are as wide as its keys, as in serving without our kernel. Ours is the
CUDA C++ kernel up to 16 heads; "Triton" is the kernel for other sizes and GPUs.
"""

from collections.abc import Sequence
from typing import Any

import torch

from colonnade.kernels.attention import reference, sdpa, triton_mla_decode
from colonnade.kernels.attention.decode_plan import KernelLayout, Kernels
from colonnade.kernels.attention.page_table import PageTable
from decoding import decode_cells
from harness.clock import Clock
from harness.rows import format_row, round_significant

RANK, ROPE, TOLERANCE = 512, 64, 4e-3
CELLS = ((128, 32, 8192), (128, 1, 65_536), (128, 128, 1024), (16, 32, 8192), (16, 1, 65_536))
TINY = ((4, 2, 60),)
"""(heads, requests, keys of each)."""


def rows(cells: Sequence[tuple[int, int, int]], device: str, read: float, *, page: int = 64) -> list[dict[str, Any]]:
    """Rows of ours and SDPA, in bfloat16."""
    found = []
    for N, batch, length in cells:
        draw = torch.Generator(device).manual_seed(0)
        pages = -(-length // page)

        def drawn(*shape: int, draw: torch.Generator = draw) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(generator=draw)

        bytes_read = batch * length * (RANK + ROPE) * 2
        # Calls in turn read another copy, so that none finds its latents in the L2 cache.
        copies = -(-decode_cells.COLD_BYTES // bytes_read) if device == "cuda" else 1
        q, k = drawn(batch, N, RANK + ROPE), drawn(copies * batch * pages, page, 1, RANK + ROPE)
        order = torch.randperm(batch * pages, device=device, generator=draw).int().view(batch, pages)
        cu = torch.arange(batch + 1, device=device, dtype=torch.int32)
        lengths = torch.full((batch,), length, device=device, dtype=torch.int32)
        tables = [PageTable(order + i * batch * pages, cu, lengths, page, 1, length) for i in range(copies)]
        right = reference.paged(q.float(), k.float(), k.float(), tables[0], values=RANK)
        runs = {"colonnade": ours(q, k, length, tables, "auto")}
        if device == "cuda" and KernelLayout.for_mla(q, k, 1, rank=RANK).cuda:
            runs["colonnade, Triton"] = ours(q, k, length, tables, "triton")

        def theirs(copy: int, case: tuple[Any, ...] = (q, k, tables)) -> torch.Tensor:
            q, k, tables = case
            return sdpa.paged(q, k, k, tables[copy], values=RANK)

        for name, run in (*runs.items(), ("sdpa, gathered", theirs)):
            mistake = decode_cells.relative_error(run, right)
            assert mistake < TOLERANCE * (1 if device == "cuda" else 3), f"{name}: {mistake:.1e} off"
            if run is theirs:  # looks up pages on the host, which a graph cannot
                took = Clock(device).median(lambda run=run: run(0), budget_s=0.1)
            else:
                took = decode_cells.graph_seconds(run, copies, device, rounds=7)
            found.append(
                {
                    "heads": N, "B": batch, "S": length, "who": name, "us": round(took * 1e6, 1),
                    "tb_per_s": round_significant(bytes_read / took / 1e12),
                    "of_read": round_significant(bytes_read / took / read),
                    "tflop_per_s": round_significant(2 * N * batch * length * (2 * RANK + ROPE) / took / 1e12),
                }
            )  # fmt: skip
            print(format_row(found[-1]), flush=True)
    return found


def ours(
    q: torch.Tensor, k: torch.Tensor, length: int, tables: Sequence[PageTable], kernels: Kernels
) -> decode_cells.Run:
    """Our kernels; on a CPU the plain executor of the same plan."""
    batch = len(q)
    layout = KernelLayout.for_mla(q, k, 1, rank=RANK, kernels=kernels)
    plan = layout.plan([length] * batch, [1] * batch)
    if q.device.type == "cpu":
        return lambda copy: reference.run_plan(plan, layout.shape, q, k, k, tables[copy]).o[..., :RANK]
    ready = layout.prepare(plan, q.device)
    return lambda copy: triton_mla_decode.attend(q, k, RANK, tables[copy], ready).o
