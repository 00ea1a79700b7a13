"""The end of a step of GPT-2 1.2B on one GPU: clip, AdamW, weights to bfloat16; in several passes and in one.

    python benchmarks/adamw.py                a GPU
    python benchmarks/adamw.py --blocks       and the kernel cut up in other ways

Gradients are bfloat16, masters and moments float32. ``several`` is what training does without ``train.fused_adamw``:
gradients to float32, their norm, torch's multi-tensor clip, torch's fused AdamW, the copy. ``one`` is the norm of
bfloat16 gradients and the kernel of ``colonnade/kernels/adamw``. Bytes are those that must be moved (52, or 30 with the
norm), so GB/s are of useful bytes; the copy of a large tensor stands beside them. Medians of CUDA-event timings.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

from colonnade.config import TrainConfig
from colonnade.config.presets import preset
from colonnade.kernels import triton_adamw
from colonnade.model import Transformer
from colonnade.parallel.axis import SOLO, SOLO_AXES
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters
from colonnade.parallel.layout import layout_of
from colonnade.train import optimizer_step
from colonnade.train.optimizer import AdamW, FusedAdamW
from harness.report import Headline, report
from harness.rows import line
from harness.training_jobs import durations

TRAIN = TrainConfig(steps=1000, warmup=0, dtype="bfloat16")
BLOCKS = [(256, 64, 4), (512, 32, 4), (512, 8, 4), (1024, 16, 4), (1024, 16, 8), (2048, 16, 8), (1024, 64, 8)]
"""Numbers at once, turns, warps."""


def ending(size: str, *, fused: bool) -> Callable[[int], None]:
    """``end(i)``: all of a step after the backward pass, beginning with bfloat16 gradients on the parameters."""
    model = Transformer(preset(size), device="cuda")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    layout = layout_of(model)
    held = masters(model, DistributedContext.solo("cuda"), torch.bfloat16, single=True)
    gradients = {p: torch.randn_like(p) * 1e-3 for p in model.parameters()}
    optimizer = FusedAdamW(held, TRAIN) if fused else AdamW(held.local, TRAIN)
    skip = torch.zeros((), device="cuda")

    @torch.no_grad()
    def end(_: int) -> None:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        if isinstance(optimizer, FusedAdamW):
            size = optimizer_step.gradient_norm(held.gradient_holders, layout, SOLO_AXES, SOLO)
            optimizer.step(1e-4, skip, None, optimizer_step.clip_factor(size, 1.0))
            return
        for name, copy in held.copies.items():
            assert copy.grad is not None
            held.local[name].grad, copy.grad = copy.grad.float(), None
        optimizer_step.clip_grads_(held.local, optimizer_step.gradient_norm(held.local, layout, SOLO_AXES, SOLO), 1.0)
        optimizer.step(1e-4, skip)
        held.update_model()

    return end


def timed(end: Callable[[int], None]) -> float:
    """Milliseconds."""
    for i in range(3):
        end(i)
    return 1e3 * statistics.median(durations(end, 20, torch.device("cuda")))


def copying() -> float:
    """GB/s of a large copy, read and written bytes together."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / timed(lambda _: target.copy_(source)) / 1e6  # type: ignore[arg-type,return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2-1.2b")
    parser.add_argument("--blocks", action="store_true", help="try other ways to cut the work up (writes no result)")
    args = parser.parse_args()
    numbers = preset(args.preset).parameters
    rows = [{"what": "a large copy", "ms": None, "GB_per_s": round(copying())}]
    print(line(rows[-1]), flush=True)
    for what, fused, each in (("several", False, 52), ("one", True, 30)):
        ways = BLOCKS if args.blocks and fused else [(triton_adamw.BLOCK, triton_adamw.ITERATIONS, triton_adamw.WARPS)]
        for way in ways:
            triton_adamw.BLOCK, triton_adamw.ITERATIONS, triton_adamw.WARPS = way
            triton_adamw._partition.cache_clear()
            ms = timed(ending(args.preset, fused=fused))
            rows.append({"what": what, "ms": round(ms, 2), "GB_per_s": round(each * numbers / ms / 1e6)})
            print(line(rows[-1]), way if fused else "", flush=True)
            torch.cuda.empty_cache()
    if not args.blocks:
        several, one = (row["ms"] for row in rows[1:])
        head = Headline(f"clip, AdamW and rounding, {args.preset}, 1 GPU", one, "ms", "torch, several passes", several)
        report("adamw_h200", rows, __doc__ or "", headlines=[head])


if __name__ == "__main__":
    main()
