"""All-gather and reduce-scatter by copy engines and by NCCL, alone and beside a product: what hides, and what it costs.

    python benchmarks/copies.py                  needs 4 GPUs; --worlds 2 with two
    python benchmarks/copies.py --tiny           the same in small, on a CPU, where nothing is beside anything

Sizes are those of GPT-2 4.2B (2304 wide) at 8 sequences of 1,024 tokens over the tensor ranks, and of half of it. The
product is (tokens, 2304) x (2304, 9216 / ranks), the largest of a block. 20 pairs are recorded as one CUDA graph, the
collectives on a stream of their own, and their mean is told: of the collectives alone, of the products alone, and of
both at once. ``exposed_ms`` is what both take beyond the products alone; ``hidden_share`` 1 is all of the collective
behind the product at no cost, 0 nothing, and below 0 is worse than one after the other.
"""

import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from _copies import Mover, Plain, mover_of
from _jobs import Row, durations, enough, parser, place, replays
from _report import Headline, report
from colonnade.config import Plan
from colonnade.parallel.axis import Axis
from colonnade.parallel.launch import launch
from colonnade.parallel.mesh import Ground

PAIRS = 20


def work(world: int, tiny: bool, device: str) -> list[Row]:
    """On every rank."""
    rows: list[Row] = []
    width, hidden, sizes = (32, 64, (64,)) if tiny else (2304, 9216, (4096, 8192))
    plan = Plan(tp=world, sequence_parallel=True)
    with Ground.build(plan, device) as ground:
        dtype = torch.float32 if tiny else torch.bfloat16
        tp, on = ground.axes.tp, ground.device
        for T in sizes:
            a_TD, w_Df = torch.randn(T, width, device=on).to(dtype), torch.randn(width, hidden // world, device=on)
            w_Df, part = w_Df.to(dtype), a_TD[: T // world].contiguous()
            multiply = lambda a_TD=a_TD, w_Df=w_Df: a_TD @ w_Df  # noqa: E731
            for name, mover in movers(tp, T * width, dtype, on).items():
                side = None if on.type == "cpu" else mover.stream or torch.cuda.Stream(on)
                for what, run in (
                    ("gather", lambda mover=mover, part=part: mover.gather(part)),
                    ("scatter_sum", lambda mover=mover, a_TD=a_TD: mover.scatter_sum(a_TD)),
                ):
                    alone, product, both = (
                        timed(mover, side, *works) for works in ((run, None), (None, multiply), (run, multiply))
                    )
                    rows.append(
                        {"what": what, "by": name, "ranks": world, "tokens": T, "alone_ms": alone,
                         "product_ms": product, "both_ms": both, "exposed_ms": round(both - product, 4),
                         "hidden_share": round((alone + product - both) / alone, 3)}
                    )  # fmt: skip
                    if ground.rank == 0:
                        print(json.dumps(rows[-1]), flush=True)
    return rows


def movers(tp: Axis, most: int, dtype: torch.dtype, device: torch.device) -> dict[str, Mover]:
    """By name."""
    plain: dict[str, Mover] = {"NCCL" if device.type == "cuda" else "gloo": Plain(tp)}
    return ({"copy engines": mover_of(tp, most, dtype, device)} if device.type == "cuda" else {}) | plain


def timed(
    mover: Mover,
    side: torch.cuda.Stream | None,
    collective: Callable[[], Tensor] | None,
    product: Callable[[], Tensor] | None,
) -> float:
    """Milliseconds of one pair."""

    def pairs(_: int = 0) -> None:
        mover.begin()
        for _ in range(PAIRS):
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            if collective is not None:
                with torch.cuda.stream(side):
                    collective()
            if product is not None:
                product()
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)

    if side is None:
        return round(1e3 * min(durations(pairs, 3, torch.device("cpu"))) / PAIRS, 4)
    found = replays(pairs, 10, side.device)
    return round(1e3 * sorted(found)[len(found) // 2] / PAIRS, 4)


def heads_of(rows: Sequence[Row]) -> list[Headline]:
    """At the largest world and size: what stays exposed by copy engines, beside NCCL."""
    last = [row for row in rows if (row["ranks"], row["tokens"]) == (rows[-1]["ranks"], rows[-1]["tokens"])]
    found = []
    for what in ("gather", "scatter_sum"):
        ours, theirs = (
            next((row["exposed_ms"] for row in last if (row["what"], row["by"]) == (what, by)), None)
            for by in ("copy engines", "NCCL")
        )
        if ours is not None:
            says = f"{what} of {last[0]['tokens']} x 2304 beside a product, {last[0]['ranks']} GPUs: what stays exposed"
            found.append(Headline(says, ours, "ms", "NCCL", theirs))
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--worlds", type=int, nargs="+", help="ranks; 2 4, with --tiny 2")
    args = options.parse_args(argv)
    worlds = args.worlds or ([2] if args.tiny else [2, 4])
    if not enough(args, max(worlds)):
        return
    device, folder, name = place(args)
    rows: list[Row] = []
    for world in worlds:
        rows += launch(work, (world, args.tiny, device), Plan(dp=world))
    report(f"copies_{name}", rows, __doc__ or "", headlines=heads_of(rows), folder=folder)


if __name__ == "__main__":
    main()
