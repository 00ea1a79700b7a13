"""Small all-reduces and all-gathers between GPUs: our one-kernel version, NCCL, torch's one-shot all-reduce.

    python benchmarks/small_allreduce.py            2 and 4 GPUs (--worlds 2 with two), messages of 4 KiB to 1 MiB
    python benchmarks/small_allreduce.py --tune     the same, and write colonnade/parallel/small_allreduce.json
    python benchmarks/small_allreduce.py --tiny     a small run over gloo on a CPU: a smoke test

In bfloat16. 40 dependent operations, as in a decode step, are captured as one CUDA graph; ``us`` is the time per
operation, the median of 30 replays on the slowest rank. ``bytes`` is the size of one rank's message. NVLink multicast
is off if the environment disables it (TORCH_SYMM_MEM_DISABLE_MULTICAST=1, NCCL_NVLS_ENABLE=0).
"""

import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from colonnade.config import Plan
from colonnade.parallel import collectives, symmetric_memory
from colonnade.parallel.axis import Axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import launch
from harness.report import Headline, report
from harness.training_jobs import Row, device_and_folder, durations, has_gpus, make_parser, replays

OPERATIONS, REPLAYS = 40, 30
OURS, NCCL, THEIRS = "one kernel", "NCCL", "torch one_shot_all_reduce"
Run = Callable[[Tensor], Tensor]


def work(world: int, tiny: bool, device: str) -> list[Row]:
    """Runs on every rank."""
    rows: list[Row] = []
    sizes = (4096, 16384) if tiny else tuple(4096 << i for i in range(9))
    with DistributedContext.build(Plan(tp=world), device) as context:
        tp, on = context.axes.tp, context.device
        for size in sizes:
            x = torch.zeros(
                size // 2, device=on, dtype=torch.bfloat16
            )  # zeros, which do not overflow when summed repeatedly
            for what, ways in (("sum", sums(tp, on, size)), ("gather", gathers(tp, on))):
                for by, run in ways.items():
                    us = tp.max_(torch.tensor([timed(run, x, what)], dtype=torch.float64)).item()
                    rows.append({"what": what, "by": by, "ranks": world, "bytes": size, "us": round(us, 2)})
                    if context.rank == 0:
                        print(json.dumps(rows[-1]), flush=True)
    return rows


_SMALL: dict[str, symmetric_memory.SmallAllReduce | None] = {}


def _small(tp: Axis, on: torch.device) -> symmetric_memory.SmallAllReduce | None:
    if tp.group not in _SMALL:
        most = (symmetric_memory.MAX_BYTES, symmetric_memory.MAX_BYTES)
        _SMALL[tp.group] = symmetric_memory.make_small_allreduce(tp, on, most) if on.type == "cuda" else None
    return _SMALL[tp.group]


def sums(tp: Axis, on: torch.device, size: int) -> dict[str, Run]:
    """All-reduce implementations by name."""
    found: dict[str, Run] = {
        NCCL if on.type == "cuda" else "gloo": lambda x: collectives.all_reduce(x, "sum", tp.group)
    }
    if ours := _small(tp, on):
        found = {OURS: ours.sum} | found
        try:
            found[THEIRS] = torchs(tp, on, size)
        except (RuntimeError, AttributeError) as why:
            print(f"{THEIRS}: {str(why).splitlines()[0][:120]}", flush=True)
    return found


def gathers(tp: Axis, on: torch.device) -> dict[str, Run]:
    """All-gather implementations by name."""
    plain = NCCL if on.type == "cuda" else "gloo"
    found: dict[str, Run] = {plain: lambda x: collectives.all_gather(x, tp.size, tp.group)}
    if ours := _small(tp, on):
        found = {OURS: ours.gather} | found
    return found


def torchs(tp: Axis, on: torch.device, size: int) -> Run:
    """torch's operator, including the copy into its symmetric buffer."""
    from torch.distributed import _symmetric_memory as symmetric

    buffer = symmetric.empty(size // 2, dtype=torch.bfloat16, device=on)
    symmetric.rendezvous(buffer, collectives.group_of(tp.group))
    return lambda x: torch.ops.symm_mem.one_shot_all_reduce(buffer.copy_(x), "sum", tp.group)


def timed(run: Run, x: Tensor, what: str) -> float:
    """Microseconds per operation."""

    def chain(_: int = 0) -> Tensor:
        y = x
        for _ in range(OPERATIONS):
            y = run(y) if what == "sum" else run(y)[: len(x)]
        return y

    if x.device.type == "cpu":
        return 1e6 * statistics.median(durations(chain, 3, x.device)) / OPERATIONS
    return 1e6 * statistics.median(replays(chain, REPLAYS, x.device)) / OPERATIONS


def limits_of(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """For each operation and number of ranks, the largest size up to which ours is never slower than NCCL."""
    found: dict[str, dict[str, int]] = {"sum": {}, "gather": {}}
    us = {(row["what"], row["ranks"], row["bytes"], row["by"]): row["us"] for row in rows}
    for what, limits in found.items():
        for ranks in {row["ranks"] for row in rows}:
            sizes = sorted({row["bytes"] for row in rows if row["ranks"] == ranks})
            ahead = itertools.takewhile(lambda n: us[what, ranks, n, OURS] <= us[what, ranks, n, NCCL], sizes)  # noqa: B023
            limits[str(ranks)] = max(ahead, default=0)
    return found


def tune(rows: Sequence[Row], machine: str) -> None:
    """Write the table of size limits; entries for other numbers of ranks are kept."""
    path = Path(symmetric_memory.__file__).with_name("small_allreduce.json")
    table = json.loads(path.read_text(encoding="utf-8"))
    for what, limits in limits_of(rows).items():
        table[what] |= limits
    table["measured_on"] = machine
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def heads_of(rows: Sequence[Row]) -> list[Headline]:
    """Ours against NCCL for 16 KiB, as in a decode step, over the most ranks."""
    most = max(row["ranks"] for row in rows)
    us = {r["by"]: r["us"] for r in rows if (r["what"], r["ranks"], r["bytes"]) == ("sum", most, 16384)}
    if OURS not in us:
        return []
    return [Headline(f"Sum of 16 KiB over {most} GPUs, in a graph", us[OURS], "µs", "NCCL", us[NCCL])]


def main(argv: list[str] | None = None) -> None:
    options = make_parser(__doc__)
    options.add_argument("--worlds", type=int, nargs="+", help="ranks; 2 4, with --tiny 2")
    options.add_argument("--tune", action="store_true", help="write the table of size limits")
    args = options.parse_args(argv)
    worlds = args.worlds or ([2] if args.tiny else [2, 4])
    if not has_gpus(args, max(worlds)):
        return
    device, folder, name = device_and_folder(args)
    rows: list[Row] = []
    for world in worlds:
        rows += launch(work, (world, args.tiny, device), Plan(dp=world))
    report(f"small_allreduce_{name}", rows, __doc__ or "", headlines=heads_of(rows), folder=folder)
    if args.tune and not args.tiny:
        tune(rows, torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
