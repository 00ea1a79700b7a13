"""The optimizer part of a GPT-2 1.2B step on one GPU: clip, AdamW, bfloat16 copy; in several passes and in one.

    python benchmarks/adamw.py                a GPU
    python benchmarks/adamw.py --blocks       tries other block sizes of the fused kernel

Gradients are bfloat16, masters and moments float32. ``several`` is what training does without ``train.fused_adamw``:
gradients to float32, their norm, torch's multi-tensor clip, torch's fused AdamW, the copy. ``one`` is the norm of
bfloat16 gradients and the kernel of ``colonnade/kernels/adamw``. GB/s count only the bytes that must be moved (52 per
parameter, or 30 for ``one``, with the norm); the copy of a large tensor is measured for comparison. Times are medians
of CUDA-event timings.
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
from harness.rows import format_row
from harness.training_jobs import durations

TRAIN = TrainConfig(steps=1000, warmup=0, dtype="bfloat16")
BLOCKS = [(256, 64, 4), (512, 32, 4), (512, 8, 4), (1024, 16, 4), (1024, 16, 8), (2048, 16, 8), (1024, 64, 8)]
"""Elements per block, iterations, warps."""


def make_end(size: str, *, fused: bool) -> Callable[[int], None]:
    """``end(i)`` runs everything after the backward pass, starting from bfloat16 gradients on the parameters."""
    model = Transformer(preset(size), device="cuda")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    layout = layout_of(model)
    weights = masters(model, DistributedContext.solo("cuda"), torch.bfloat16, single=True)
    gradients = {p: torch.randn_like(p) * 1e-3 for p in model.parameters()}
    optimizer = FusedAdamW(weights, TRAIN) if fused else AdamW(weights.local, TRAIN)
    skip = torch.zeros((), device="cuda")

    @torch.no_grad()
    def end(_: int) -> None:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        if isinstance(optimizer, FusedAdamW):
            size = optimizer_step.gradient_norm(weights.gradient_holders, layout, SOLO_AXES, SOLO)
            optimizer.step(1e-4, skip, None, optimizer_step.clip_factor(size, 1.0))
            return
        for name, copy in weights.copies.items():
            assert copy.grad is not None
            weights.local[name].grad, copy.grad = copy.grad.float(), None
        optimizer_step.clip_grads_(
            weights.local, optimizer_step.gradient_norm(weights.local, layout, SOLO_AXES, SOLO), 1.0
        )
        optimizer.step(1e-4, skip)
        weights.update_model()

    return end


def timed(end: Callable[[int], None]) -> float:
    """Milliseconds."""
    for i in range(3):
        end(i)
    return 1e3 * statistics.median(durations(end, 20, torch.device("cuda")))


def copy_bandwidth() -> float:
    """GB/s of a large copy, counting bytes read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / timed(lambda _: target.copy_(source)) / 1e6  # type: ignore[arg-type,return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2-1.2b")
    parser.add_argument("--blocks", action="store_true", help="try other block sizes (writes no result)")
    args = parser.parse_args()
    parameters = preset(args.preset).parameters
    rows = [{"what": "a large copy", "ms": None, "GB_per_s": round(copy_bandwidth())}]
    print(format_row(rows[-1]), flush=True)
    for what, fused, bytes_each in (("several", False, 52), ("one", True, 30)):
        blocks = (
            BLOCKS if args.blocks and fused else [(triton_adamw.BLOCK, triton_adamw.ITERATIONS, triton_adamw.WARPS)]
        )
        for block in blocks:
            triton_adamw.BLOCK, triton_adamw.ITERATIONS, triton_adamw.WARPS = block
            triton_adamw._partition.cache_clear()
            ms = timed(make_end(args.preset, fused=fused))
            rows.append({"what": what, "ms": round(ms, 2), "GB_per_s": round(bytes_each * parameters / ms / 1e6)})
            print(format_row(rows[-1]), block if fused else "", flush=True)
            torch.cuda.empty_cache()
    if not args.blocks:
        several, one = (row["ms"] for row in rows[1:])
        head = Headline(f"clip, AdamW and rounding, {args.preset}, 1 GPU", one, "ms", "torch, several passes", several)
        report("adamw_h200", rows, __doc__ or "", headlines=[head])


if __name__ == "__main__":
    main()
