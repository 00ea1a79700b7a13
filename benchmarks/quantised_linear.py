"""Skinny GEMMs with quantised weights on a GPU: TB/s of stored bytes, against bfloat16.

    python benchmarks/quantised_linear.py                # Llama-2-7B's matrices, 1 to 64 rows
    python benchmarks/quantised_linear.py --tune         # all candidate tiles and splits; prints the best five per cell
    python benchmarks/quantised_linear.py --tiny         # the reference on a CPU: a smoke test

A CUDA graph of several calls is timed, each call on another copy of the weights, so that none finds them in the L2
cache; the time is per call.
"""

import argparse
import itertools
from pathlib import Path

import torch
from torch.nn import functional as F

from colonnade.kernels.linear import reference
from colonnade.kernels.linear.quantise import Quantised, quantise
from decoding.decode_cells import graph_seconds, read_bandwidth
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import format_row

SHAPES = {"qkv": (12288, 4096), "out": (4096, 4096), "up": (11008, 4096), "down": (4096, 11008)}
COLD_BYTES = 2**28


def copies_of(weight: Quantised) -> list[Quantised]:
    number = max(1, min(64, -(-COLD_BYTES // weight.nbytes)))
    return [weight._replace(values=weight.values.clone(), scales=weight.scales.clone()) for _ in range(number)]


def measure(rows: list[int], tune: bool) -> list[dict[str, Cell]]:
    from colonnade.kernels.linear import skinny_gemm
    from colonnade.kernels.linear.skinny_gemm_tiles import SplitKTiles

    found: list[dict[str, Cell]] = []
    bandwidth = read_bandwidth("cuda")
    for (name, (outputs, inputs)), T in itertools.product(SHAPES.items(), rows):
        plain = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(T, inputs, device="cuda", dtype=torch.bfloat16)
        stored = plain.expand(max(2, COLD_BYTES // plain.nbytes), -1, -1).contiguous()
        base_s = graph_seconds(lambda i: F.linear(x, stored[i]), len(stored), "cuda")  # noqa: B023 - called at once
        found.append(_row(name, T, "bfloat16", base_s, plain.nbytes, bandwidth, base_s))
        for kind in ("int8", "int4", "float8"):
            each = copies_of(quantise(plain, kind, 64))
            s = graph_seconds(lambda i: skinny_gemm.quantised_linear(x, each[i]), len(each), "cuda")  # noqa: B023
            found.append(_row(name, T, kind, s, each[0].nbytes, bandwidth, base_s))
            print(format_row(found[-1]), flush=True)
            if not tune:
                continue
            tried = []
            columns = (16, 32, 64) if kind == "int4" else (64, 128, 256)
            outs = (64, 128)
            for out, column, warps, stages, splits in itertools.product(outs, columns, (2, 4, 8), (2, 4), (1, 2, 4, 8)):
                tiles = SplitKTiles(out, column, warps, stages)
                try:
                    s = graph_seconds(lambda i: skinny_gemm.split_k(x, each[i], tiles, splits), len(each), "cuda")  # noqa: B023
                except Exception as why:  # noqa: BLE001 - some tiles are too large for the GPU
                    print(tiles, splits, str(why).splitlines()[0][:80])
                    continue
                tried.append((s, tiles, splits))
            for s, tiles, splits in sorted(tried)[:5]:
                print(f"  {name} T={T} {kind}: {1e6 * s:.1f} us  {tiles} splits={splits}", flush=True)
    return found


def _row(name: str, rows: int, kind: str, s: float, size: int, bandwidth: float, base_s: float) -> dict[str, Cell]:
    return {
        "matrix": name, "rows": rows, "weights": kind, "us": round(1e6 * s, 2), "tb_per_s": round(size / s / 1e12, 3),
        "of_bandwidth": round(size / s / bandwidth, 3), "times_bfloat16": round(base_s / s, 2),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 16, 64])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="the reference on a CPU; writes no record")
    args = parser.parse_args(argv)
    if args.tiny:
        weight = quantise(torch.randn(40, 64), "int4", 32)
        print(reference.quantised_linear(torch.randn(2, 64), weight).shape)
        return
    found = measure(args.rows, args.tune)
    best = max(float(row["times_bfloat16"]) for row in found if row["rows"] == 1 and row["weights"] == "int4")
    heads = [Headline("One row times a matrix in int4, against bfloat16", best, "times", "bfloat16", 1.0)]
    if not args.tune:
        report("quantised_linear_h200", found, notes=__doc__ or "", headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()
