"""GPTQ of one matrix on a GPU: the Triton kernel for a block of 128 columns against the loop in plain torch.

    python benchmarks/gptq_columns.py            # SmolLM2's matrices and one of Llama-2-7B: half a minute
    python benchmarks/gptq_columns.py --tiny     # a small matrix on a CPU, the reference only; prints, writes no record

``block_ms`` is one block of 128 columns, ``matrix_ms`` all blocks with the products between them, with a given factor
of H. Medians of 5 and more runs with a cold level-2 cache. ``same`` is the share of the values that are the
reference's: a fused multiply-add may round a tie the other way, which changes later columns of that row.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from colonnade.compress.gptq import BLOCK, correct_blocks, damped, inverse_factor
from colonnade.compress.grids import choose_grid
from colonnade.kernels.linear.gptq_columns import Rounding
from colonnade.kernels.registry import choose
from harness.clock import Clock
from harness.report import Cell, Headline, folder_of, report
from harness.rows import format_row, round_significant

SHAPES = {
    "SmolLM2-135M, q, k and v": (960, 576),
    "SmolLM2-135M, gate": (1536, 576),
    "SmolLM2-135M, down": (576, 1536),
    "Llama-2-7B, down": (4096, 11008),
}
TINY = {"tiny": (48, 256)}
Run = Callable[[Tensor, Tensor, Rounding], tuple[Tensor, Tensor]]


def measure(name: str, shape: tuple[int, int], kind: str, device: str, kernels: Sequence[str]) -> list[dict[str, Cell]]:
    """One matrix, a row for each kernel, the reference first."""
    outputs, inputs = shape
    draw, clock = torch.Generator(device).manual_seed(0), Clock(device)
    w_FD = torch.randn(outputs, inputs, generator=draw, device=device)
    x_ND = torch.randn(2 * inputs, inputs, generator=draw, device=device)
    x_ND[:, 1:] += 0.5 * x_ND[:, :-1]  # neighbouring inputs are correlated
    u_DD = inverse_factor(damped(2 / len(x_ND) * x_ND.T @ x_ND))
    columns_D = torch.arange(inputs, device=device)
    grid = None if kind == "sparse24" else choose_grid(w_FD, kind, 64, "affine")  # type: ignore[arg-type]

    def rounding(columns: slice) -> Rounding:
        return Rounding("sparse24") if grid is None else grid.rounding(grid.groups(columns_D[columns]))

    def whole(run: Run) -> Tensor:
        return correct_blocks(w_FD, u_DD, lambda w, u, columns: run(w, u, rounding(columns)))

    first, rows, want_FD = slice(BLOCK), list[dict[str, Cell]](), None
    block_rounding, u_CC = rounding(first), u_DD[first, first]
    for kernel in kernels:
        run: Run = choose("gptq_columns", device, torch.float32, kernel)
        q_FD = whole(run)
        want_FD = q_FD if want_FD is None else want_FD
        block_s = clock.median(lambda run=run: run(w_FD[:, first].clone(), u_CC, block_rounding), 0.5)
        rows.append({
            "matrix": name, "outputs": outputs, "inputs": inputs, "kind": kind, "kernel": kernel,
            "block_ms": round_significant(1e3 * block_s),
            "matrix_ms": round_significant(1e3 * clock.median(lambda run=run: whole(run), 1)),
            "same": round(float((q_FD == want_FD).float().mean()), 5),
        })  # fmt: skip
        print(format_row(rows[-1]), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        print("gptq_columns needs a GPU, and this machine has none")
        return
    device, kernels = ("cpu", ["reference"]) if args.tiny else ("cuda", ["reference", "triton"])
    rows = []
    for kind in ("int4",) if args.tiny else ("int4", "int8", "sparse24"):
        for name, shape in (TINY if args.tiny else SHAPES).items():
            if kind == "int4" or not name.startswith("Llama"):
                rows += measure(name, shape, kind, device, kernels)
    if args.tiny:
        return
    reference, triton = (
        float(row["matrix_ms"] or 0) for row in rows if row["matrix"] == "Llama-2-7B, down" and row["kind"] == "int4"
    )
    head = Headline("GPTQ in int4, Llama-2-7B's down projection", triton, "ms", "plain torch", reference)
    gpu = "h200" if "H200" in torch.cuda.get_device_name() else "h100"
    report(f"gptq_columns_{gpu}", rows, __doc__ or "", headlines=[head], folder=folder_of(args.out, toy=False))


if __name__ == "__main__":
    main()
