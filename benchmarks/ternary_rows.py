"""Ternary weights times a few rows on a GPU, against int4 and bfloat16 in the same run.

    python benchmarks/ternary_rows.py                # matrices, and the experts of one token in Mixtral-8x7B
    python benchmarks/ternary_rows.py --tune         # all candidate warps and tiles; writes no record
    python benchmarks/ternary_rows.py --tiny         # on a CPU, the references: writes no record

A CUDA graph of several calls is timed, each call on another copy of the weights, so that none finds them in the level-2
cache; the time is per call. Weights are random words: all places are equally likely, as after GPTQ. bfloat16 experts
are two gathered matrices as separate products, without a kernel that routes.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels import permute
from colonnade.kernels.experts.quantised import QuantisedWeights
from colonnade.kernels.linear import reference, ternary
from colonnade.kernels.linear.quantise import Quantised, quantise
from decoding.decode_cells import graph_seconds
from harness.report import Cell, Headline, folder_of, report
from harness.rows import format_row

SHAPES = {"up": (11008, 4096), "down": (4096, 11008), "gate and up, Mixtral": (28672, 4096)}
TINY = {"up": (48, 40)}
LAYER, TINY_LAYER = (8, 14336, 4096), (3, 24, 40)
"""Experts, hidden units, width."""
COLD_BYTES = 2**28


def random_ternary(outputs: int, inputs: int, trits: int, device: str) -> Quantised:
    """Random words, without the seconds of choosing places."""
    words = torch.randint(ternary.word_count(trits), (outputs, -(-inputs // trits)), device=device)
    if inputs % trits:
        words[:, -1] = 0  # has places beyond the inputs
    scale = torch.full((outputs, 1), 1 / 16, dtype=torch.bfloat16, device=device)
    return Quantised("ternary", words.to(torch.int16), scale, inputs, trits)


def random_weight(kind: str, outputs: int, inputs: int, device: str) -> Quantised | Tensor:
    if kind.startswith("ternary"):
        return random_ternary(outputs, inputs, int(kind.split()[1]), device)
    plain = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
    return plain if kind == "bfloat16" else quantise(plain, "int4", 64)


def copies(weight: Quantised | Tensor, most: int) -> list[Quantised] | list[Tensor]:
    count = max(1, min(most, -(-COLD_BYTES // weight.nbytes)))
    if isinstance(weight, Tensor):
        return [weight.clone() for _ in range(count)]
    return [weight._replace(values=weight.values.clone(), scales=weight.scales.clone()) for _ in range(count)]


KINDS = ("bfloat16", "int4 g64", "ternary 18", "ternary 24", "ternary 32")


def matrices(device: str, *, tiny: bool, rows: tuple[int, ...]) -> list[dict[str, Cell]]:
    found: list[dict[str, Cell]] = []
    for (name, (outputs, inputs)), kind in itertools.product((TINY if tiny else SHAPES).items(), KINDS):
        each = copies(random_weight(kind, outputs, inputs, device), 1 if tiny else 64)
        for T in rows:
            x = torch.randn(T, inputs, device=device, dtype=torch.bfloat16)
            s = graph_seconds(lambda i: multiply(x, each[i]), len(each), device)  # noqa: B023 - called at once
            found.append(_row(name, T, kind, s, each[0].nbytes))
            print(format_row(found[-1]), flush=True)
    return found


def multiply(x: Tensor, weight: Quantised | Tensor) -> Tensor:
    if isinstance(weight, Tensor):
        return F.linear(x, weight)
    if not x.is_cuda:
        return reference.quantised_linear(x, weight)
    from colonnade.kernels.linear import skinny_gemm  # imports Triton

    return skinny_gemm.linear(x, weight)


def experts(device: str, *, tiny: bool, tokens: tuple[int, ...]) -> list[dict[str, Cell]]:
    """A layer of experts, 2 per token; each call has other weights, and the first experts."""
    (E, hidden, width), active = TINY_LAYER if tiny else LAYER, 2
    found: list[dict[str, Cell]] = []
    for kind in KINDS[1:]:

        def stack(outputs: int, inputs: int, kind: str = kind) -> Quantised:
            first = random_weight(kind, outputs, inputs, device)
            assert isinstance(first, Quantised)
            return first._replace(
                values=first.values.expand(E, -1, -1).contiguous(),
                scales=first.scales.expand(E, *first.scales.shape).contiguous(),
            )

        plain = QuantisedWeights(stack(hidden, width), stack(width, hidden), stack(hidden, width))
        size = sum(t.nbytes for t in plain.tensors)
        count = 1 if tiny else max(2, min(16, -(-COLD_BYTES // size)))
        each = [plain.map(torch.clone) for _ in range(count)]
        for T in tokens:
            x = torch.randn(T, width, device=device, dtype=torch.bfloat16)
            ids_TA = (torch.arange(T * active, device=device) % E).view(T, active)
            order_R, ends_E = permute.sort(ids_TA, E, T * active)
            routing = torch.full((T, active), 0.5, device=device, dtype=torch.bfloat16)
            run = _routed(device)
            s = graph_seconds(lambda i: run(x, order_R, ends_E, routing, each[i], "silu"), count, device)  # noqa: B023
            read = size * min(T * active, E) // E
            found.append(_row("experts of Mixtral-8x7B", T, kind, s, read))
            print(format_row(found[-1]), flush=True)
    return found


def _routed(device: str) -> Callable[..., Tensor]:
    if device == "cpu":
        from colonnade.kernels.experts import quantised

        return quantised.routed
    from colonnade.kernels.experts import triton_quantised

    return triton_quantised.routed


def _row(name: str, rows: int, kind: str, s: float, size: int) -> dict[str, Cell]:
    return {
        "what": name, "rows": rows, "weights": kind, "mb_read": round(size / 1e6, 2), "us": round(1e6 * s, 2),
        "tb_per_s": round(size / s / 1e12, 3),
    }  # fmt: skip


def tune() -> None:
    from colonnade.kernels.linear import cuda_ternary, triton_ternary

    made = {name: copies(random_ternary(*shape, 18, "cuda"), 64) for name, shape in SHAPES.items()}
    rows = {name: torch.randn(1, shape[1], device="cuda", dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    for (name, each), warps in itertools.product(made.items(), (8, 12, 16, 20, 32)):
        x, y = rows[name], rows[name].new_empty(1, each[0].outputs)
        s = graph_seconds(lambda i: cuda_ternary.launch(x, each[i], y, warps=warps), len(each), "cuda", rounds=5)  # noqa: B023
        print(f"{name} 18: {1e6 * s:.2f} us in CUDA C++, {warps} warps", flush=True)
    for name, each in made.items():
        x, tried = rows[name], []
        for two, splits, unroll in itertools.product((False, True), (4, 8, 16), (1, 2)):
            tiles = triton_ternary.Tiles(triton_ternary.BN, splits, unroll, splits, two)
            s = graph_seconds(lambda i: triton_ternary.linear(x, each[i], tiles), len(each), "cuda", rounds=5)  # noqa: B023
            tried.append((s, tiles))
        for two_levels in (False, True):
            for s, tiles in sorted(each for each in tried if each[1].two_levels == two_levels)[:3]:
                print(f"{name} 18: {1e6 * s:.2f} us {tiles}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.tune:
        return tune()
    device = "cpu" if args.tiny else "cuda"
    rows = tuple(args.rows[:1] if args.tiny else args.rows)
    found = matrices(device, tiny=args.tiny, rows=rows) + experts(device, tiny=args.tiny, tokens=rows)
    first = {(row["what"], row["weights"]): float(row["us"] or 0) for row in found if row["rows"] == rows[0]}
    heads = [
        Headline(f"{what}, {rows[0]} row: time of int4 over ternary (0.889 bits)", round(us / first[what, KINDS[2]], 2),
                 "times", "int4", 1.0)
        for (what, kind), us in first.items() if kind == KINDS[1]
    ]  # fmt: skip
    report("ternary_rows", found, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=args.tiny))
    return None


if __name__ == "__main__":
    main()
