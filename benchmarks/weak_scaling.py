"""Weak scaling of tensor parallelism at the shapes of Megatron-LM's table 1, against torch's own.

    python benchmarks/weak_scaling.py                     needs 4 GPUs; --worlds 1 2 with two
    python benchmarks/weak_scaling.py --who torch_async   only some of the layouts
    python benchmarks/weak_scaling.py --tiny              toy sizes on a CPU

1.2B (40 x 1536) on one GPU, 2.5B (54 x 1920) on two, 4.2B (64 x 2304) on four, batch 8, sequence 1024, vocabulary
51,200 (arXiv 1909.08053, section 5.1 and table 1). TFLOP/s count all scores, as the paper does, and no recomputation.

    colonnade, colonnade_sp     tp over all ranks, without and with sequence parallelism: float32 masters, clip
    colonnade_overlap           sequence parallelism with plan.tp_overlap
                                all of ours as a CUDA graph (train.cuda_graph), except with --pieces
    torch, torch_sp             plain modules under parallelize_module; bfloat16 parameters and moments, no clip
    torch_async                 torch_sp with inductor's micro-pipeline: collectives split and overlapped with GEMMs

Each block is compiled in all of them. After the timed steps two are traced on rank 0: traced_compute_ms is the device's
compute time, traced_communication_exposed_ms the time of collectives not overlapped by compute
(colonnade.train.profiler). torch_async moves data by copy engines, which the trace shows as copies or as communication.
If inductor finds nothing to overlap, it warns "async TP found no matching"; then torch_async equals torch_sp.
"""

from collections.abc import Callable, Sequence
from functools import partial

from colonnade.config import Plan
from colonnade.config.presets import preset
from harness.report import Headline, report
from harness.torch_parallelize import TorchJob
from harness.training_jobs import FAST, PLAIN, Job, Row, device_and_folder, has_gpus, make_parser, run_jobs

SHAPES = {1: "gpt2-1.2b", 2: "gpt2-2.5b", 4: "gpt2-4.2b", 8: "gpt2-8.3b"}
"""Presets by number of ranks."""
OVERLAPPED = "colonnade_overlap"
KINDS: dict[str, Callable[..., Job]] = {
    "colonnade": Job,
    "colonnade_sp": Job,
    OVERLAPPED: Job,
    "torch": TorchJob,
    "torch_sp": TorchJob,
    "torch_async": partial(TorchJob, asynchronous=True),
}
CONFIGURATIONS = tuple(KINDS)
OURS = tuple(name for name in KINDS if name.startswith("colonnade"))
WHOLE = ("colonnade", "torch")
"""Layouts without sequence parallelism, which also run on one GPU."""


def jobs(
    tiny: bool, worlds: Sequence[int], who: Sequence[str], *, fused: bool = False, pieces: bool = False
) -> list[Job]:
    """A job for each layout that runs on each number of ranks."""
    made: list[Job] = []
    for ranks in worlds:
        for name in who:
            if (name not in WHOLE and ranks == 1) or (tiny and name == "torch_async"):
                continue
            plan = Plan(tp=ranks, sequence_parallel=name not in WHOLE, tp_overlap=name == OVERLAPPED)
            if tiny:
                config = preset("gpt2").replace(vocab_size=208, layers=2, width=32, heads=4, ffn_width=64, context=32)
                made.append(KINDS[name](name, config, plan, 32, 2, PLAIN.replace(fused_adamw=fused), 1, 2, 1))
            else:
                train = FAST.replace(fused_adamw=fused, cuda_graph=name in OURS and not pieces)
                made.append(KINDS[name](name, preset(SHAPES[ranks]), plan, 1024, 8, train, 4, 8, 2))
    return made


def heads_of(rows: Sequence[Row]) -> list[Headline]:
    """Our best layout against torch's best for each number of ranks."""
    heads = []
    for ranks in sorted({row["ranks"] for row in rows}):
        rates = {row["what"]: row["tflops_per_rank_all_scores"] for row in rows if row["ranks"] == ranks}
        best = {
            kind: max((name for name in rates if name.startswith(kind)), key=rates.__getitem__, default=None)
            for kind in ("colonnade", "torch")
        }
        ours, theirs = best["colonnade"], best["torch"]
        if ours and theirs:
            what = f"train {SHAPES[ranks]}, batch 8, {ours}, tp={ranks}"
            heads.append(Headline(what, rates[ours], "TFLOP/s per GPU", theirs, rates[theirs]))
    return heads


def main(argv: list[str] | None = None) -> None:
    options = make_parser(__doc__)
    options.add_argument("--worlds", type=int, nargs="+", choices=SHAPES, help="ranks; 1 2 4, with --tiny 1 2")
    options.add_argument("--who", nargs="+", choices=CONFIGURATIONS, default=CONFIGURATIONS, help="layouts to measure")
    options.add_argument("--pieces", action="store_true", help="colonnade without CUDA graphs")
    options.add_argument("--fused", action="store_true", help="colonnade with train.fused_adamw")
    args = options.parse_args(argv)
    worlds = args.worlds or ([1, 2] if args.tiny else [1, 2, 4])
    if not has_gpus(args, max(worlds)):
        return
    device, folder, name = device_and_folder(args)
    rows = run_jobs(jobs(args.tiny, worlds, args.who, fused=args.fused, pieces=args.pieces), device, args.keep)
    report(f"weak_scaling_{max(worlds)}_{name}", rows, __doc__ or "", headlines=heads_of(rows), folder=folder)


if __name__ == "__main__":
    main()
