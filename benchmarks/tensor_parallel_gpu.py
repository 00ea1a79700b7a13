"""Tensor parallelism on GPUs: parity under NCCL, and step time at tp = 1 and 2.

    python benchmarks/tensor_parallel_gpu.py            # needs two GPUs

Parity: a 4-layer model with an uneven vocabulary and hidden width, and ragged documents; loss and every gradient at
tp = 2 against tp = 1 in float64 (tolerance 1e-10), and both in bfloat16 against float64, by relative norm over all
gradients: this is the rounding error, to which the layout should add nothing. Speed: GPT-2 1.2B (40 x 1536),
batch 8, sequence 1024, each block compiled, float32 masters; median of CUDA-event timings.
"""

import itertools
import statistics

import numpy as np
import torch

from colonnade.config import ModelConfig, Plan, TrainConfig
from colonnade.model import Loss, Packed, Stream, Transformer, initialise
from colonnade.parallel.axis import world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters
from colonnade.parallel.launch import launch
from colonnade.parallel.layout import PARTIAL, layout_of
from colonnade.train.optimizer import AdamW
from colonnade.train.train_step import TrainStep
from harness.report import Headline, report
from harness.rows import format_row
from train_gpt2 import SEQUENCE, Batch, config_of

PARITY = ModelConfig(
    family="qwen3", vocab_size=50257, layers=4, width=256, heads=8, kv_heads=4, head_width=64, ffn_width=1023,
    context=512, qk_norm=True, tied=True,
)  # fmt: skip
LENGTHS = [300, 1, 77, 512]


def gradients(plan: Plan, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """The loss and every unsharded gradient, in float64 on the CPU."""
    with DistributedContext.build(plan, "cuda") as context:
        tp = context.axes.tp
        model = initialise(Transformer(PARITY, context.axes, device=context.device, dtype=dtype), 0)
        generator = torch.Generator().manual_seed(0)
        tokens, targets = (
            torch.randint(PARITY.vocab_size, (sum(LENGTHS),), generator=generator).cuda() for _ in range(2)
        )
        positions = torch.cat([torch.arange(n) for n in LENGTHS]).cuda()
        total, count = model(Stream(tokens, positions), Packed.of(LENGTHS, "cuda"), Loss(targets))
        (total / count).backward()
        layout, shapes = layout_of(model), model.global_shapes()
        whole = {"loss": (total / count).detach().double().cpu().numpy()}
        for name, p in model.named_parameters():
            assert p.grad is not None
            grad, sharded = p.grad.double(), layout[name]
            if sharded is PARTIAL:
                grad = tp.sum_(grad)
            elif isinstance(sharded, int):
                grad = tp.join(grad, sharded, shapes[name][sharded])
            whole[name] = grad.cpu().numpy()
        return whole


def worst(got: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    """The largest |Δ| over max(1, ‖reference‖∞) of any tensor."""
    return max(float(np.abs(got[k] - r).max() / max(1.0, np.abs(r).max())) for k, r in reference.items() if r.size)


def relative(got: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    """‖Δ‖ / ‖reference‖ over all gradients together."""
    names = [k for k in reference if k != "loss"]
    delta = sum(float(np.square(got[k] - reference[k]).sum()) for k in names)
    return (delta / sum(float(np.square(reference[k]).sum()) for k in names)) ** 0.5


def speed(plan: Plan, batch: int, steps: int) -> dict[str, float]:
    """Median step time, throughput and memory."""
    with DistributedContext.build(plan, "cuda") as context:
        config = config_of("1.2b")
        plan.check(config)
        model = initialise(Transformer(config, context.axes, device=context.device), 0)
        train = TrainConfig(steps=1000, lr=1e-4, min_lr=0, warmup=0)
        weights = masters(model, context, torch.bfloat16)
        step = TrainStep(model, weights, AdamW(weights.local, train), train, world_axis())
        for block in model.blocks:
            block.compile()
        batches = [Batch(batch, seed) for seed in range(4)]
        first, *_ = [float(step(i, [batches[i % 4]]).loss_sum) / len(batches[0].tokens_T) for i in range(4)]
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for i in range(steps):
            step(4 + i, [batches[i % 4]])
            marks[i + 1].record()
        torch.cuda.synchronize()
        step_ms = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
        rate = batch * SEQUENCE / step_ms * 1e3
        tflops = rate * config.flops_per_token(SEQUENCE, causal=False) / 1e12 / plan.world
        peak = torch.cuda.max_memory_allocated() / 2**30
        return {
            "step_ms": round(step_ms, 2),
            "tokens_per_s": round(rate),
            "tflops_per_gpu": round(tflops, 1),
            "first_loss": round(first, 4),
            "peak_gib": round(peak, 1),
        }


def main() -> None:
    rows: list[dict[str, str | float]] = []
    reference = launch(gradients, (Plan(), torch.float64), Plan())
    for tp, dtype in ((2, torch.float64), (1, torch.bfloat16), (2, torch.bfloat16)):
        got = launch(gradients, (Plan(tp=tp), dtype), Plan(tp=tp))
        rows.append(
            {
                "what": f"parity, tp={tp}, {str(dtype).removeprefix('torch.')}, against float64 at tp=1",
                "loss": round(got["loss"].item(), 6),
                "worst_error": worst(got, reference),
                "relative_gradient_error": relative(got, reference),
            }
        )
        print(format_row(rows[-1]), flush=True)
    assert float(rows[0]["worst_error"]) < 1e-10, "tp=2 does not compute what tp=1 computes"
    rates = {}
    for tp in (1, 2):
        plan = Plan(tp=tp)
        result = launch(speed, (plan, 8, 16), plan)
        rates[tp] = result["tokens_per_s"]
        rows.append({"what": f"GPT-2 1.2B, batch 8, tp={tp}", **result})
        print(format_row(rows[-1]), flush=True)
    head = Headline("train GPT-2 1.2B, tp=2 on 2 H200, batch 8", rates[2], "tokens/s", "tp=1 on one", rates[1])
    report("tensor_parallel_h200", rows, __doc__ or "", headlines=[head])


if __name__ == "__main__":
    main()
