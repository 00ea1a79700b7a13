"""MLA decoding with DeepSeek-V2's latents of 512 + 64 values (benchmarks/flash_decoding.py).

128 heads are a complete layer, 16 are one of eight tensor-parallel ranks. TB/s count each latent read once. SDPA gets
the gathered pages as one key head whose values are as wide as its keys, as in serving without our kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch

from colonnade.kernels.attention import reference, sdpa, triton_mla_decode
from colonnade.kernels.attention.decode_plan import KernelLayout
from colonnade.kernels.attention.page_table import PageTable
from decoding import decode_cells
from harness.rows import figures, line

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

        q, k = drawn(batch, N, RANK + ROPE), drawn(batch * pages, page, 1, RANK + ROPE)
        pages_BP = torch.randperm(batch * pages, device=device, generator=draw).int().view(batch, pages)
        cu = torch.arange(batch + 1, device=device, dtype=torch.int32)
        lengths = torch.full((batch,), length, device=device, dtype=torch.int32)
        table = PageTable(pages_BP, cu, lengths, page, 1, length)
        layout = KernelLayout.for_mla(q, k, 1)
        plan = layout.plan([length] * batch, [1] * batch)
        ready = layout.prepare(plan, device)

        def ours(_: int, case: tuple[Any, ...] = (q, k, table, plan, layout, ready)) -> torch.Tensor:
            q, k, table, plan, layout, ready = case
            if q.device.type == "cpu":
                return reference.run_plan(plan, layout.shape, q, k, k, table).o[..., :RANK]
            return triton_mla_decode.attend(q, k, RANK, table, ready).o

        def theirs(_: int, case: tuple[Any, ...] = (q, k, table)) -> torch.Tensor:
            q, k, table = case
            return sdpa.paged(q, k, k, table, values=RANK)

        right = reference.paged(q.float(), k.float(), k.float(), table, values=RANK)
        for name, run in (("colonnade", ours), ("sdpa, gathered", theirs)):
            mistake = decode_cells.error(run, right)
            assert mistake < TOLERANCE * (1 if device == "cuda" else 3), f"{name}: {mistake:.1e} off"
            took = decode_cells.replayed(run, 1, device, rounds=7)
            bytes_read = k[0, 0].nbytes * batch * length
            found.append(
                {
                    "heads": N, "B": batch, "S": length, "who": name, "us": round(took * 1e6, 1),
                    "tb_per_s": figures(bytes_read / took / 1e12), "of_read": figures(bytes_read / took / read),
                    "tflop_per_s": figures(2 * N * batch * length * (2 * RANK + ROPE) / took / 1e12),
                }
            )  # fmt: skip
            print(line(found[-1]), flush=True)
    return found
