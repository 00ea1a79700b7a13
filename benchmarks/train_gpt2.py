"""Training speed of a GPT-2 shape on one GPU, against Hugging Face's compiled model.

    python benchmarks/train_gpt2.py --preset 1.2b --batch 32

Ours: float32 masters and AdamW state, bfloat16 compute, each block compiled. Theirs: ``GPT2LMHeadModel`` in bfloat16
(parameters, gradients and AdamW state: less memory traffic than ours, and less precise), compiled as a whole. Both:
dropout 0, sequence 1024, fused AdamW, gradient clipping at 1. A step is forward, backward, clip, AdamW. Times are
medians of CUDA-event timings over steps on rotating random batches, after warm-up.

    --fused    colonnade with train.fused_adamw        --graph    with train.cuda_graph (a result has both)
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path

import torch

from colonnade.config import ModelConfig, TrainConfig
from colonnade.data import Batch
from colonnade.model import Transformer
from colonnade.parallel.axis import SOLO
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters
from colonnade.train.train_step import TrainStep
from colonnade.train.training_state import make_optimizer
from harness.report import Headline, report
from harness.rows import format_row
from harness.torch_training import training_update
from harness.training_jobs import free_memory, random_batch, random_weights

SHAPES = {"124m": (12, 768, 12), "355m": (24, 1024, 16), "1.2b": (40, 1536, 16)}
VOCAB, SEQUENCE = 50257, 1024


def config_of(name: str) -> ModelConfig:
    layers, width, heads = SHAPES[name]
    return ModelConfig(
        family="gpt2", vocab_size=VOCAB, layers=layers, width=width, heads=heads, ffn_width=4 * width, context=SEQUENCE,
        positions="learned", norm="layernorm", activation="gelu_tanh", gated=False, qkv_bias=True, out_bias=True,
        ffn_bias=True, tied=True,
    )  # fmt: skip


def ours(config: ModelConfig, batches: list[Batch], train: TrainConfig):
    context = DistributedContext.solo("cuda")
    model = random_weights(Transformer(config, device="cuda"))
    weights = masters(model, context, torch.bfloat16, single=train.fused_adamw)
    step = TrainStep(model, weights, make_optimizer(weights, train), train, SOLO, cuda_graph=train.cuda_graph)
    for block in model.blocks:
        block.compile()
    return lambda i: step(i, [batches[i % len(batches)]]).loss_sum / len(batches[0].tokens_T)


def theirs(config: ModelConfig, batches: list[Batch], train: TrainConfig):
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(
        vocab_size=VOCAB, n_positions=SEQUENCE, n_embd=config.width, n_layer=config.layers, n_head=config.heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("cuda"):
        model = GPT2LMHeadModel(shape).to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.lr, weight_decay=train.weight_decay, fused=True)
    run = torch.compile(model)

    def step(i: int):
        batch = batches[i % len(batches)]
        ids = batch.tokens_T.view(-1, SEQUENCE)
        loss = run(input_ids=ids, labels=ids).loss
        training_update(model, optimizer, loss)
        return loss.detach()

    return step


def measure(step, steps: int) -> tuple[float, float, float]:
    """(median milliseconds per step, first loss, seconds of warm-up)."""
    began = time.perf_counter()
    first, *_ = [float(step(i)) for i in range(4)]
    torch.cuda.synchronize()
    warm_s = time.perf_counter() - began
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for i in range(steps):
        step(4 + i)
        marks[i + 1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)), first, warm_s


def profile(step, path: str) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step(0)
        torch.cuda.synchronize()
    table = trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90)
    Path(path).write_text(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=SHAPES, default="1.2b")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--fused", action="store_true", help="colonnade with the fused AdamW")
    parser.add_argument("--graph", action="store_true", help="colonnade with CUDA graphs")
    parser.add_argument("--only", choices=["ours", "theirs"], help="measure only one side (writes no result)")
    parser.add_argument("--profile", help="write a kernel table of one of our steps to this file")
    args = parser.parse_args()
    config = config_of(args.preset)
    train = TrainConfig(
        steps=1000, lr=1e-4, min_lr=0, warmup=0, weight_decay=0.01, fused_adamw=args.fused, cuda_graph=args.graph
    )
    batches = [random_batch(config, SEQUENCE, args.batch, seed, torch.device("cuda")) for seed in range(4)]
    tokens = args.batch * SEQUENCE
    options = [what for what in ("fused", "graph") if getattr(args, what)]
    our_name = " ".join(["colonnade", *(f"--{what}" for what in options)])
    rows = []
    for name, build in ((our_name, ours), ("transformers, compiled", theirs)):
        if args.only and args.only not in build.__name__:
            continue
        torch.cuda.reset_peak_memory_stats()
        step = build(config, batches, train)
        step_ms, first, warm_s = measure(step, args.steps)
        rate = tokens / step_ms * 1e3
        rows.append(
            {
                "who": name,
                "step_ms": round(step_ms, 2),
                "tokens_per_s": round(rate),
                "tflops_all_scores": round(rate * config.flops_per_token(SEQUENCE, causal=False) / 1e12, 1),
                "tflops_causal": round(rate * config.flops_per_token(SEQUENCE, causal=True) / 1e12, 1),
                "first_loss": round(first, 4),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
                "warm_up_s": round(warm_s, 1),
            }
        )
        print(format_row(rows[-1]), flush=True)
        if args.profile and build is ours:
            profile(step, args.profile)
        del step
        free_memory(torch.device("cuda"))
    if len(rows) == 2:
        own, peer = rows
        head = Headline(
            f"train GPT-2 {args.preset} ({config.layers} x {config.width}), 1 GPU, batch {args.batch}",
            own["tokens_per_s"],
            "tokens/s",
            "transformers, compiled",
            peer["tokens_per_s"],
        )
        report("_".join([f"train_gpt2_{args.preset}", *options, "h200"]), rows, __doc__ or "", headlines=[head])


if __name__ == "__main__":
    main()
