"""A layer of experts on a GPU in bfloat16: our kernels, torch's grouped GEMM, and ``transformers``.

    python benchmarks/moe_layer.py --out "$OUT"                        # the main rows: 5 minutes on one H200
    python benchmarks/moe_layer.py --shapes qwen3 --tokens 16384 --loads zipf --passes forward
    python benchmarks/moe_layer.py --quick --no-report                 # two shapes, 64 and 16,384 tokens: 80 s
    python benchmarks/moe_layer.py --profile --shapes mixtral --tokens 1 256 32768     # our kernels one by one: 30 s
    python benchmarks/moe_layer.py --shares                            # router, dispatch, combine: 16,384 tokens, 40 s
    python benchmarks/moe_layer.py --tiny                              # toy sizes, also on a CPU: a smoke test

Shapes are Mixtral-8x7B's, DeepSeek-V2-Lite's (with 8 choices) and Qwen3-30B-A3B's. All implementations get the same
tokens, choices, routing weights and expert weights, each does its own sorting, and their results are compared. Loads
are uniform or Zipf-distributed: experts are drawn without replacement with probabilities 1/1, 1/2, 1/3, …

TFLOP/s count the actual rows without padding: 6RDF forward and 12RDF more backward. ``of_dense`` is the rate over that
of one dense GEMM of 8192³ random values in the same run; ``of_bandwidth`` compares the bytes of the chosen experts,
read once, with the bandwidth of a copy in the same run, for few tokens. Each time is a median; before each run the L2
cache is filled with other data. Forward passes without a host sync are replayed as CUDA graphs, so that launches do not
count, as in a real decoder; ``waits`` marks those with a sync. A peer that fails, or computes something else, gets a
row with the reason, and the run continues. Each row is written to disk at once; after ``--minutes`` no row is started.

Rows cover the experts alone. ``router_dispatch_combine`` is the share of everything but the expert GEMMs in a complete
layer with its router, by the times of its kernels (``layer_share.py``).

Time: some 210 forward rows at 0.4 s, 80 with backward at 0.8 s, about 100 kernels that Triton compiles at 1.5 s.
Memory: at most 30 GiB (Mixtral's widths, 32,768 tokens, with backward).
"""

import argparse
import functools
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.experts import grouped_mm
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.registry import LOOKUP, choose
from colonnade.model.moe.experts import sorting_costs_more, unsorted_kernel
from harness.clock import Clock
from harness.report import Headline, folder_of, report
from harness.rows import Row, Rows
from moe.layer_profile import lines, timeline
from moe.layer_share import layer_of, measure_shares, report_lines


class Shape(NamedTuple):
    """E experts, A per token, widths D and F."""

    E: int
    A: int
    D: int
    F: int


SHAPES = {
    "mixtral": Shape(8, 2, 4096, 14336),
    "deepseek": Shape(64, 8, 2048, 1408),
    "qwen3": Shape(128, 8, 2048, 768),
}
TINY = {"mixtral": Shape(4, 2, 64, 96), "deepseek": Shape(8, 4, 64, 48), "qwen3": Shape(16, 4, 64, 32)}
FAILURES: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)
"""Exceptions of a peer that give a row without a time: out of memory, missing operators; and Triton's own."""
if importlib.util.find_spec("triton") is not None:
    from triton.errors import TritonError

    FAILURES += (TritonError,)
TOKENS = (1, 16, 64, 256, 4096, 16384, 32768)
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def stacks(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Weights, Tensor]:
    """Our weights, and the peers' stacked weights of the first GEMM: gate above up, (E, 2F, D)."""
    draw = torch.Generator(device).manual_seed(0)

    def stack(rows: int, scale: float) -> Tensor:
        drawn = torch.empty(shape.E, rows, shape.D, device=device, dtype=dtype)
        return drawn.normal_(0, scale, generator=draw).requires_grad_()

    both = stack(2 * shape.F, shape.D**-0.5)
    gate, up = (half.detach().clone().requires_grad_() for half in both.chunk(2, 1))
    return Weights(up, stack(shape.F, shape.F**-0.5), gate), both


def ours(shape: Shape, weights: Weights, kernels: str = "auto") -> Run:
    def run(x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        kind, dtype = x_TD.device.type, x_TD.dtype
        if kernels == "auto" and (unsorted := unsorted_kernel(x_TD, ids_TA, weights, shape.E)) is not None:
            return unsorted(x_TD, ids_TA, weights_TA, weights, "silu")
        order_R, ends_E = choose("sort_by_expert", kind, dtype)(ids_TA, shape.E)
        if kernels in ("auto", "sorted"):
            return choose("routed_experts", kind, dtype)(x_TD, order_R, ends_E, weights_TA, weights, "silu")
        x_RD = choose("gather_rows", kind, dtype)(x_TD, order_R, shape.A)
        y_RD = choose("dropout_experts", kind, dtype, kernels)(x_RD, ends_E, weights, "silu")
        return choose("combine_rows", kind, dtype)(y_RD, order_R, weights_TA)

    return run


def pipeline(shape: Shape, both_EgD: Tensor, down_EFD: Tensor) -> Run:
    """Experts as a careful user writes them with torch alone."""

    def run(x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        ids_R, order_R = ids_TA.flatten().sort()
        ends_E = torch.searchsorted(ids_R, torch.arange(1, shape.E + 1, device=ids_R.device)).int()
        gate_RF, up_RF = grouped_mm.product(x_TD[order_R // shape.A], both_EgD.transpose(1, 2), ends_E).chunk(2, 1)
        y_RD = grouped_mm.product(F.silu(gate_RF) * up_RF, down_EFD, ends_E)
        weighted_RD = y_RD * weights_TA.flatten()[order_R].unsqueeze(1).to(y_RD.dtype)
        back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
        return weighted_RD[back_R].view(-1, shape.A, shape.D).sum(1)

    return run


def transformers(shape: Shape, both_EgD: Tensor, down_EDF: Tensor, how: str) -> Run | None:
    """transformers' experts on the same weights; None if the installed version lacks them."""
    try:
        from transformers.models.mixtral.configuration_mixtral import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    except ImportError as why:
        print(f"transformers {how}: skipped, {why}", flush=True)
        return None
    sizes = {"hidden_size": shape.D, "intermediate_size": shape.F}
    config = MixtralConfig(**sizes, num_local_experts=shape.E, num_experts_per_tok=shape.A)
    with torch.device("meta"):
        experts = MixtralExperts(config)
    del experts.gate_up_proj, experts.down_proj
    experts.gate_up_proj, experts.down_proj = both_EgD, down_EDF  # not parameters: all implementations share one leaf

    def run(x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        config._experts_implementation = how
        return experts(x_TD, ids_TA, weights_TA.to(x_TD.dtype))

    return run


def choices(T: int, shape: Shape, load: str, device: str, rank: int = 0) -> Tensor:
    """(T, A) distinct experts of each token; every rank draws its own."""
    draw = torch.Generator().manual_seed(T + rank)
    chance_E = torch.ones(shape.E) if load == "uniform" else 1 / torch.arange(1.0, shape.E + 1)
    noise_TE = -torch.empty(T, shape.E).exponential_(generator=draw).log()
    return (chance_E.log() + noise_TE).topk(shape.A).indices.to(device)


def inputs_of(T: int, shape: Shape, load: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x_TD in bfloat16, the experts of each token, and their weights (T, A)."""
    draw = torch.Generator().manual_seed(T)
    x_TD = torch.randn(T, shape.D, generator=draw).bfloat16().to(device).requires_grad_()
    weights_TA = torch.rand(T, shape.A, generator=draw).softmax(1).to(device).requires_grad_()
    return x_TD, choices(T, shape, load, device), weights_TA


def measure(
    clock: Clock, name: str, shape: Shape, args: argparse.Namespace, dense_flops: float, copy_bytes: float, rows: Rows
) -> None:
    device, dtype = args.device, torch.bfloat16
    weights, both_EgD = stacks(shape, device, dtype)
    down_EDF = weights.down_EFD.detach().transpose(1, 2).contiguous().requires_grad_()
    runs: dict[str, Run | None] = {"colonnade": ours(shape, weights)}
    if ("few_token_experts", device, dtype, "auto") in LOOKUP:
        runs["colonnade, sorted"] = ours(shape, weights, "sorted")
    if grouped_mm.available:
        runs["colonnade, grouped_mm"] = ours(shape, weights, "grouped")
        runs["grouped_mm pipeline"] = pipeline(shape, both_EgD, weights.down_EFD)
    for how in ("grouped_mm", "eager"):
        runs[f"transformers {how}"] = transformers(shape, both_EgD, down_EDF, how)
    leaves = [both_EgD, down_EDF, *(w for w in weights if w is not None)]
    title = f"{name} E={shape.E} A={shape.A} D={shape.D} F={shape.F}"
    for T, load in ((T, load) for T in args.tokens for load in args.loads):
        if time.perf_counter() > args.until:
            print(f"{name}, {T} tokens, {load}: skipped, {args.minutes:g} minutes are over", flush=True)
            continue
        x_TD, ids_TA, weights_TA = inputs_of(T, shape, load, device)
        exact = None
        for who, run in runs.items():
            if run is None or (args.who and who not in args.who):
                continue
            if who == "colonnade, sorted" and not sorting_costs_more(T, shape.A, shape.E, weights):
                continue  # then "colonnade" sorts, too
            head: Row = {"shape": title, "load": load, "tokens": T, "who": who}
            try:
                with torch.no_grad():
                    y_TD = run(x_TD, ids_TA, weights_TA).float()
                exact = y_TD if exact is None else exact
                error = float((y_TD - exact).norm() / exact.norm())
                failed = None if error < 2e-2 else f"computes something else: {error:.1e}"
            except FAILURES as why:  # pyrefly: ignore[not-a-type]
                failed = reason(why)
            if failed:
                rows.add(head | {"failed": failed})
                continue
            waits = who == "transformers eager" or not clock.gpu
            for step in args.passes:
                if step != "forward" and clock.gpu and (T < 1024 or (waits and shape.E > 8)):
                    continue  # decoding has no backward; eager's writes a gradient of all experts for each expert
                try:
                    row, waits = timing(clock, run, (x_TD, ids_TA, weights_TA), leaves, step, waits=waits)
                    part = None
                    if (who, load) == ("colonnade", "uniform"):
                        layer = layer_of(shape.A, weights)
                        part = round(measure_shares(layer, x_TD, back=step != "forward", gpu=clock.gpu).share, 3)
                except FAILURES as why:  # pyrefly: ignore[not-a-type]
                    rows.add(head | {"pass": step, "failed": reason(why)})
                    torch.cuda.empty_cache()
                    continue
                flops = (6 if step == "forward" else 18) * T * shape.A * shape.D * shape.F
                touched = int(ids_TA.unique().numel()) * 3 * shape.D * shape.F * 2
                busiest = float(ids_TA.flatten().bincount().max()) * shape.E / ids_TA.numel()
                rows.add(
                    head
                    | {
                        "pass": step, "ms": round(row * 1e3, 4),
                        "tflops": round(flops / row / 1e12, 1), "of_dense": round(flops / row / dense_flops, 3),
                        "of_bandwidth": round(touched / row / copy_bytes, 3) if step == "forward" else None,
                        "busiest_over_mean": round(busiest, 2),
                        "router_dispatch_combine": part,
                        "waits": waits,
                    }
                )  # fmt: skip


def one_pass(run: Run, inputs: tuple[Tensor, Tensor, Tensor], leaves: list[Tensor], *, back: bool) -> None:
    with torch.set_grad_enabled(back):
        y_TD = run(*inputs)
    if back:
        torch.autograd.grad(y_TD, [inputs[0], inputs[2], *leaves], inputs[0].detach())


def show(name: str, shape: Shape, args: argparse.Namespace, dense_flops: float) -> None:
    """Print the time of each of our kernels in one pass, with backward from 1024 tokens on."""
    weights, _ = stacks(shape, args.device, torch.bfloat16)
    run, leaves = ours(shape, weights), [w for w in weights if w is not None]
    for T, load in ((T, load) for T in args.tokens for load in args.loads):
        inputs = inputs_of(T, shape, load, args.device)
        back = T >= 1024 or args.tiny
        print(f"{name}, {T} tokens, {load}, forward{'+backward' if back else ''}:", flush=True)
        once = functools.partial(one_pass, run, inputs, leaves, back=back)
        kernels = timeline(once, gpu=args.device == "cuda")
        for line in lines(kernels, 2 * T * shape.A * shape.D * shape.F, dense_flops):
            print(line, flush=True)


def show_shares(name: str, shape: Shape, args: argparse.Namespace) -> None:
    """Print the share of router, dispatch and combine in a complete layer."""
    layer = layer_of(shape.A, stacks(shape, args.device, torch.bfloat16)[0])
    for T, step in ((T, step) for T in args.tokens for step in args.passes):
        if step == "forward" or T >= 1024 or args.tiny:
            x_TD = torch.randn(T, shape.D, generator=torch.Generator().manual_seed(T)).bfloat16().to(args.device)
            print(f"{name}, {T} tokens, {step}:", flush=True)
            for line in report_lines(measure_shares(layer, x_TD, back=step != "forward", gpu=args.device == "cuda")):
                print(line, flush=True)


def reason(why: Exception) -> str:
    """A failure in one line. CUDA errors are re-raised, since nothing runs on the device after them."""
    if "CUDA error" in str(why) and "captur" not in str(why):
        raise why
    return f"{type(why).__name__}: {(str(why).splitlines() or [''])[0][:160]}"


def timing(
    clock: Clock, run: Run, inputs: tuple[Tensor, Tensor, Tensor], leaves: list[Tensor], step: str, *, waits: bool
) -> tuple[float, bool]:
    """Median seconds of one pass, and whether it waits for the device, which prevents a CUDA graph.

    Backward passes write gradients and do not accumulate them.
    """
    if step == "forward":

        def once() -> None:
            with torch.no_grad():
                run(*inputs)

        replayed = once
        if not waits:
            try:
                replayed = clock.graphed(once)
            except RuntimeError as why:
                if "captur" not in str(why):
                    raise
                waits = True
        return clock.median(replayed, 0.15), waits

    def both() -> None:
        y_TD = run(*inputs)
        y_TD.backward(inputs[0].detach())
        for leaf in (*inputs, *leaves):
            leaf.grad = None

    return clock.median(both, 0.3), waits


def ceilings(clock: Clock, device: str, n: int) -> tuple[float, float]:
    """(FLOP/s of a dense n³ GEMM, bytes/s of a copy, read and written)."""
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    dense = 2 * n**3 / clock.median(lambda: a @ b, 0.5)
    source = torch.randn(n * n * 8, device=device)
    target = torch.empty_like(source)
    return dense, 2 * source.numel() * 4 / clock.median(lambda: target.copy_(source), 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="layers to measure")
    parser.add_argument("--tokens", nargs="+", type=int, help="tokens per call")
    parser.add_argument("--loads", nargs="+", choices=("uniform", "zipf"), default=["uniform", "zipf"])
    parser.add_argument(
        "--passes", nargs="+", choices=("forward", "forward+backward"), default=["forward", "forward+backward"]
    )
    parser.add_argument("--who", nargs="+", help="measure only these, such as colonnade")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: a smoke test")
    parser.add_argument(
        "--quick", action="store_true", help="Mixtral's and Qwen3's, 64 and 16,384 tokens, uniform load"
    )
    parser.add_argument("--profile", action="store_true", help="only print the kernels of one of our passes")
    parser.add_argument("--shares", action="store_true", help="only print the share of router, dispatch and combine")
    parser.add_argument("--minutes", type=float, default=8.0, help="time after which no further row is started")
    parser.add_argument(
        "--out", type=Path, help="folder of the JSON file; benchmarks/results, with --tiny a temporary one"
    )
    parser.add_argument("--no-report", action="store_true", help="write no record; rows of a failed run stay on disk")
    args = parser.parse_args()
    folder = folder_of(args.out, toy=args.tiny)
    args.until = time.perf_counter() + 60 * args.minutes
    args.tokens = args.tokens or ([16384] if args.shares else list(TOKENS))
    if args.quick:
        args.shapes, args.tokens, args.loads = ["mixtral", "qwen3"], [64, 16384], ["uniform"]
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and not args.tiny:
        print("skipped: needs a GPU, and this machine has none (--tiny runs toy sizes; moe_cpu.py measures a CPU)")
        return
    if args.tiny:
        args.tokens = [1, 40]
    if args.shares:
        for name in args.shapes:
            show_shares(name, (TINY if args.tiny else SHAPES)[name], args)
        return
    clock = Clock(args.device)
    dense, copied = ceilings(clock, args.device, 256 if args.tiny else 8192)
    print(f"dense {dense / 1e12:.1f} TFLOP/s, copy {copied / 1e12:.2f} TB/s", flush=True)
    if args.profile:
        for name in args.shapes:
            show(name, (TINY if args.tiny else SHAPES)[name], args, dense)
        return
    rows = Rows("moe_layer_tiny" if args.tiny else "moe_layer_h200", folder)
    for name in args.shapes:
        measure(clock, name, (TINY if args.tiny else SHAPES)[name], args, dense, copied, rows)
    if args.no_report or args.tiny:
        rows.done()
        return
    full = [row for row in rows if "failed" not in row]

    def headlines(step: str, load: str) -> list[Headline]:
        lines = []
        for name in args.shapes:
            here = [r for r in full if str(r["shape"]).startswith(name) and (r["pass"], r["load"]) == (step, load)]
            most = max((int(r["tokens"] or 0) for r in here), default=0)
            best = {str(r["who"]): float(r["tflops"] or 0) for r in here if r["tokens"] == most}
            rest = [(value, who) for who, value in best.items() if not who.startswith("colonnade")]
            if "colonnade" in best and rest:
                what = f"{name} experts, {most} tokens, {load} load, {step}"
                lines.append(Headline(what, best["colonnade"], "TFLOP/s", max(rest)[1], max(rest)[0]))
        return lines

    notes = (
        f"bfloat16, medians, cold caches; dense GEMM of 8192³ in this run {dense / 1e12:.1f} TFLOP/s, copy "
        f"{copied / 1e12:.2f} TB/s (read and written); FLOPs without padding; all times include the sort and exclude "
        "the router, but router_dispatch_combine is of a layer with its router; of_bandwidth compares the "
        "chosen experts' weights, read once, with the copy."
    )
    heads = [line for step in args.passes for load in args.loads for line in headlines(step, load)]
    report("moe_layer_h200", rows, notes, headlines=heads, folder=folder)
    rows.done()


if __name__ == "__main__":
    main()
