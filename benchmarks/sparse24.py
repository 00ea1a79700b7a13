"""Products with 2:4 sparse weights on a GPU: torch's cuSPARSELt against the dense product, in bfloat16.

    python benchmarks/sparse24.py            # Llama-2-7B's matrices, 1 to 8,192 rows: half a minute

A CUDA graph of several calls is timed. ``sparse_bytes`` are those of the compressed weights: half of the values, and
two bits for each value that is kept.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

from colonnade.compress.sparse24 import by_size
from decoding.decode_cells import graph_seconds
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import format_row

SHAPES = {"gate and up": (22016, 4096), "down": (4096, 11008), "qkv": (12288, 4096)}
ROWS = 1, 16, 64, 128, 256, 512, 1024, 4096, 8192
COPIES = 3
"""Of the weights, in turns, so that none is in the L2 cache."""


def measure(name: str, rows: int) -> dict[str, Cell]:
    """One matrix."""
    outputs, inputs = SHAPES[name]
    draw = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    w_FD, x_TD = by_size(normal(outputs, inputs)), normal(rows, inputs)
    dense, sparse = ([make(w_FD) for _ in range(COPIES)] for make in (Tensor.clone, to_sparse_semi_structured))
    want, got = F.linear(x_TD, w_FD), F.linear(x_TD, sparse[0])
    off = float((got - want).float().norm() / want.float().norm())
    dense_us, sparse_us = (
        1e6 * graph_seconds(lambda i, copies=copies: F.linear(x_TD, copies[i]), COPIES, "cuda")
        for copies in (dense, sparse)
    )
    return {
        "matrix": name, "rows": rows, "dense_us": round(dense_us, 1), "sparse_us": round(sparse_us, 1),
        "speed_up": round(dense_us / sparse_us, 2), "difference": float(f"{off:.2g}"),
        "sparse_bytes": outputs * inputs // 16 * 18, "dense_bytes": w_FD.nbytes,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    SparseSemiStructuredTensor._FORCE_CUTLASS = False
    rows = []
    for name in SHAPES:
        for count in ROWS:
            rows.append(measure(name, count))
            print(format_row(rows[-1]), flush=True)
    most = next(row for row in rows if row["matrix"] == "gate and up" and row["rows"] == 1024)
    head = Headline(
        "2:4 sparse gate and up of Llama-2-7B, 1,024 rows", float(most["sparse_us"] or 0), "µs", "dense",
        float(most["dense_us"] or 0),
    )  # fmt: skip
    gpu = "h200" if "H200" in torch.cuda.get_device_name() else "h100"
    report(f"sparse24_{gpu}", rows, __doc__ or "", headlines=[head], folder=args.out)


if __name__ == "__main__":
    main()
