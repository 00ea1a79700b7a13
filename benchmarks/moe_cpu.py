"""Experts on a CPU against ``transformers``: Mixtral's and OLMoE's layers at a quarter of their width.

    python benchmarks/moe_cpu.py                # --shapes olmoe --tokens 1 64 --dtypes float32 to pick

All take the same tokens, choices (uniform over the experts) and weights, and their results are compared. The router is
not part of the timing. The peers are the module's own loop (eager), ``batched_mm`` and ``grouped_mm``; ``batched_mm``
copies the chosen experts' weights for each choice and is skipped where the copies exceed 1 GB. All alternate; the ratio
is the median of the per-round ratios.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.mixtral import modeling_mixtral
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.olmoe import modeling_olmoe
from transformers.models.olmoe.configuration_olmoe import OlmoeConfig

from colonnade.kernels.experts.loop import down_column_major
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.registry import choose
from harness.paired_timing import OtherProcesses, run_interleaved, wall_clock
from harness.report import Cell, Headline, folder_of, report


class Shape(NamedTuple):
    """A layer of E experts, A per token, of widths D and F."""

    E: int
    A: int
    D: int
    F: int


SHAPES = {"mixtral": Shape(8, 2, 1024, 3584), "olmoe": Shape(64, 8, 512, 256)}
TINY = {"mixtral": Shape(4, 2, 32, 48), "olmoe": Shape(8, 4, 32, 24)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
COPIES_BYTES = 1e9


def peer(name: str, shape: Shape, dtype: torch.dtype) -> Any:
    """transformers' experts with random weights."""
    sizes = {"hidden_size": shape.D, "intermediate_size": shape.F, "num_experts_per_tok": shape.A}
    if name == "mixtral":
        experts = modeling_mixtral.MixtralExperts(MixtralConfig(**sizes, num_local_experts=shape.E))
    else:
        experts = modeling_olmoe.OlmoeExperts(OlmoeConfig(**sizes, num_experts=shape.E))
    draw = torch.Generator().manual_seed(0)
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=shape.D**-0.5, generator=draw)
    return experts.to(dtype)


def ours(experts: Any, shape: Shape) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Our kernels on copies of their weights in our layout."""
    gate_EFD, up_EFD = (w.clone() for w in experts.gate_up_proj.detach().chunk(2, 1))
    down_EFD = experts.down_proj.detach().transpose(1, 2)
    down_EFD = down_EFD.clone() if down_column_major(shape.F * shape.D, down_EFD.dtype) else down_EFD.contiguous()
    weights = Weights(up_EFD, down_EFD, gate_EFD)
    stacks = [w for w in weights if w is not None]

    def run(x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        kind = x_TD.dtype
        order_R, ends_E = choose("sort_by_expert", "cpu", kind)(ids_TA, shape.E)
        return choose("routed_experts", "cpu", kind)(x_TD, order_R, ends_E, weights_TA, weights, "silu")

    run.leaves = stacks  # type: ignore[attr-defined]
    return run


def theirs(experts: Any, how: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def run(x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        experts.config._experts_implementation = how
        return experts(x_TD, ids_TA, weights_TA)

    return run


def measure(name: str, shape: Shape, dtype: torch.dtype, T: int, rounds: int, *, backward: bool) -> list[dict]:
    experts = peer(name, shape, dtype)
    runs = {"colonnade": ours(experts, shape), "eager": theirs(experts, "eager")}
    copies = T * shape.A * 3 * shape.D * shape.F * experts.down_proj.element_size()
    if copies <= COPIES_BYTES:
        runs["batched_mm"] = theirs(experts, "batched_mm")
    runs["grouped_mm"] = theirs(experts, "grouped_mm")
    leaves = [*experts.parameters(), *runs["colonnade"].leaves]  # type: ignore[attr-defined]
    for leaf in leaves:
        leaf.requires_grad_(backward)
    draw = torch.Generator().manual_seed(T)
    inputs = []
    for _ in range(4):
        x_TD = torch.randn(T, shape.D, generator=draw).to(dtype)
        ids_TA = torch.rand(T, shape.E, generator=draw).argsort(1)[:, : shape.A]
        inputs.append((x_TD, ids_TA, torch.rand(T, shape.A, generator=draw).softmax(1).to(dtype)))

    def step(run: Callable[..., Tensor]) -> Callable[[int], None]:
        def once(i: int) -> None:
            with torch.set_grad_enabled(backward):
                y_TD = run(*inputs[i % 4])
                if backward:
                    y_TD.backward(y_TD.detach())
            for leaf in leaves:
                leaf.grad = None

        return once

    with torch.no_grad():
        exact = runs["eager"](*inputs[0]).float()
        for who, run in runs.items():
            error = float((run(*inputs[0]).float() - exact).norm() / exact.norm())
            assert error < (1e-5 if dtype == torch.float32 else 2e-2), f"{who} computes something else: {error:.1e}"
    times = run_interleaved({who: wall_clock(step(run)) for who, run in runs.items()}, rounds)
    best = {who: statistics.median(took) for who, took in times.items()}
    return [
        {
            "shape": f"{name} E={shape.E} A={shape.A} D={shape.D} F={shape.F}",
            "dtype": str(dtype).removeprefix("torch."),
            "pass": "forward+backward" if backward else "forward",
            "tokens": T,
            "who": who if who == "colonnade" else f"transformers {who}",
            "ms": round(1e3 * best[who], 3),
            "colonnade_speed_over_it": round(
                statistics.median(b / a for a, b in zip(times["colonnade"], took, strict=True)), 3
            ),
        }
        for who, took in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="layers to measure")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes to measure")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="tokens per call")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; a third as many from 1024 tokens on")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--backward", action="store_true", help="forward and backward, with gradients of weights")
    parser.add_argument("--tiny", action="store_true", help="toy widths: a smoke test; the record is temporary")
    parser.add_argument("--no-report", action="store_true", help="print only; write no result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    neighbours, rows = OtherProcesses(), []
    for name in args.shapes:
        for dtype in args.dtypes:
            for T in args.tokens:
                rounds = max(3, args.rounds // 3) if T >= 1024 else args.rounds
                shape = (TINY if args.tiny else SHAPES)[name]
                measured = measure(name, shape, DTYPES[dtype], T, rounds, backward=args.backward)
                print(
                    name,
                    dtype,
                    T,
                    {row["who"]: (row["ms"], row["colonnade_speed_over_it"]) for row in measured},
                    flush=True,
                )
                rows += measured
    peers = [row for row in rows if row["who"] in ("transformers eager", "transformers batched_mm")]
    print("lowest speed over the better of eager and batched:", min(row["colonnade_speed_over_it"] for row in peers))
    if args.no_report:
        return

    def headline(name: str, T: int) -> list[Headline]:
        here = [r for r in rows if r["shape"].startswith(name) and (r["tokens"], r["dtype"]) == (T, "float32")]
        if not here:
            return []
        eager, batched = (next((r["ms"] for r in here if r["who"].endswith(w)), None) for w in ("eager", "batched_mm"))
        better = min(ms for ms in (eager, batched) if ms is not None)
        what = f"experts of {here[0]['shape']}, {T} tokens on a CPU, float32"
        return [Headline(what, here[0]["ms"], "ms", "transformers, its faster path", better)]

    notes = (
        f"{args.threads} threads; medians of alternating rounds; choices uniform over the experts; no router; "
        f"{neighbours}."
    )
    cells: list[dict[str, Cell]] = rows
    heads = [line for name in args.shapes for T in (1, 256) for line in headline(name, T)]
    name = "moe_cpu" + "_backward" * args.backward + "_tiny" * args.tiny
    report(name, cells, notes, headlines=heads, folder=folder_of(None, toy=args.tiny))


if __name__ == "__main__":
    main()
