"""The assumptions that the parallel ground floor stands on, tried on this machine.

    python benchmarks/ground_check.py                       CPU: worlds 1, 2, 4; GPUs: worlds 1 and 2
    torchrun --nproc-per-node 2 benchmarks/ground_check.py --worlds 2

    (a) training under tp and FSDP2 is training in one process; any plan loads any checkpoint; what FSDP2 sums
    (c) torch's pipeline schedules over our blocks, with tp and FSDP2 inside
    (d) torch.compile of blocks: graphs, breaks, recompilations
    (e) activation checkpointing: which collectives the backward pass repeats

Numbers are float64 where nothing else is said; an error is relative to the larger of 1 and the reference. A world that
dies (a collective that hangs is given up after a minute) leaves the rows of the others.
"""

import argparse
import datetime
import json
import sys
import tempfile
import warnings
from contextlib import ExitStack

import torch
import torch.distributed as dist

import _ground_compile
import _ground_pipeline
import _ground_recompute
import _ground_storage
from _ground import Row, Table
from _report import report
from colonnade.config import Plan
from colonnade.errors import ColonnadeError
from colonnade.parallel import distributed_context
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import launch

PARTS = {"a": _ground_storage.check, "d": _ground_compile.check, "e": _ground_recompute.check}
PARTS["c"] = _ground_pipeline.check  # last: the likeliest to hang


def work(world: int, parts: str, device: str, compiler: str, kept: str) -> None:
    """All checks of one world; rank 0 appends the rows to the file ``kept``, one by one."""
    distributed_context.TIMEOUT = datetime.timedelta(seconds=60)
    warnings.filterwarnings("ignore", message=".*(reduce_op|device_id|single.process|no_dist|barrier).*")
    with (
        DistributedContext.build(Plan(tp=world), device) as context,
        tempfile.TemporaryDirectory() as folder,
        ExitStack() as stack,
    ):
        scratch = [folder]
        if world > 1:
            dist.broadcast_object_list(scratch, device=torch.device("cpu"))
        table = Table(context, stack, scratch[0], compiler, kept)
        for part, check in PARTS.items():
            if part in parts:
                check(table)
        table.everybody("done")  # nobody's folder goes while another reads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpus > 1 else "cpu")
    parser.add_argument("--worlds", type=int, nargs="+", choices=[1, 2, 4], help="default: what the device allows")
    parser.add_argument("--parts", default="acde", help="letters of the checks to run")
    parser.add_argument(
        "--compiler", default=None, help="backend of torch.compile: inductor on GPUs, aot_eager on CPUs"
    )
    parser.add_argument("--no-report", action="store_true", help="print only")
    args = parser.parse_args()
    worlds = args.worlds or ([1, 2] if args.device == "cuda" else [1, 2, 4])
    compiler = args.compiler or ("inductor" if args.device == "cuda" else "aot_eager")
    backend = "nccl" if args.device == "cuda" else "gloo"
    rows: list[Row] = []
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as kept:
        for world in worlds:
            try:
                launch(work, (world, args.parts, args.device, compiler, kept.name), Plan(tp=world))
            except ColonnadeError as why:
                print(f"world {world} died: {why}", *getattr(why, "__notes__", []), sep="\n", flush=True)
                rows.append(Row("-", "what comes after the rows of this world", world, "", f"died: {why}"[:300]))
            rows += [Row(**json.loads(line)) for line in kept]
    if not rows:
        return  # under torchrun, every rank but the first
    bad = [row for row in rows if row.verdict != "ok"]
    print(
        f"\ntorch {torch.__version__}, {backend}, compiler {compiler}: {len(rows) - len(bad)} of {len(rows)} checks ok"
    )
    for row in bad:
        print(f"({row.part}) world {row.world} | {row.check} | {row.figure} | {row.verdict}")
    if not args.no_report:
        notes = f"{__doc__}\nBackend {backend}, compiler {compiler}."
        report(f"ground_check_{backend}", [row.flat() for row in rows], notes)
    sys.exit(any(row.verdict.startswith("died") for row in rows))


if __name__ == "__main__":
    main()
