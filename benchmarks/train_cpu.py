"""Training speed of the tour model on a CPU, against ``transformers``' Llama of the same size.

    python benchmarks/train_cpu.py

A step is forward, backward, clip at 1, AdamW. Ours is the training loop's (``TrainStep``, masters, ``AdamW``). Theirs
is ``LlamaForCausalLM`` with the same initial weights (through our export), ``torch.optim.AdamW(fused=True)`` with the
same two groups, and ``clip_grad_norm_``. Both see the same batches and targets: the next token, none for the last of a
sequence. So both must have the same loss at every step, which is checked.

The two alternate step by step; the ratio is the median of the per-step ratios.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from colonnade.checkpoint.hf.write import write_hf
from colonnade.config import TrainConfig
from colonnade.config.presets import preset
from colonnade.data import Batch
from colonnade.model import IGNORE, Packed, Transformer, initialise
from colonnade.parallel.axis import SOLO
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters
from colonnade.train.optimizer import AdamW
from colonnade.train.train_step import TrainStep
from harness.paired_timing import OtherProcesses, run_interleaved, wall_clock
from harness.report import Headline, report
from harness.torch_training import training_update

CONFIG = preset("tour")
TRAIN = TrainConfig(lr=3e-4, warmup=0, schedule="constant", clip=1.0)


def batch(number: int, samples: int, sequence: int) -> Batch:
    """Random tokens; the last target of each sample is omitted, as in transformers' shift."""
    generator = torch.Generator().manual_seed(number)
    tokens_BS = torch.randint(CONFIG.vocab_size, (samples, sequence), generator=generator)
    targets_BS = torch.cat((tokens_BS[:, 1:], torch.full((samples, 1), IGNORE)), dim=1)
    packed = Packed.of([sequence] * samples)
    positions_T = torch.arange(sequence).repeat(samples)
    return Batch(
        tokens_BS.flatten(), positions_T, targets_BS.flatten(), packed.cu_seqlens, packed.longest, packed.equal
    )


def ours(model: Transformer, batches: list[Batch], losses: list[float]) -> Callable[[int], None]:
    weights = masters(model, DistributedContext.solo("cpu"), torch.float32)
    step = TrainStep(model, weights, AdamW(weights.local, TRAIN), TRAIN, SOLO)

    def run(i: int) -> None:
        outcome = step(i, [batches[i % len(batches)]])
        losses.append((outcome.loss_sum / outcome.count).item())

    return run


def theirs(model: LlamaForCausalLM, batches: list[Batch], losses: list[float]) -> Callable[[int], None]:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": TRAIN.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    betas = (TRAIN.beta1, TRAIN.beta2)
    optimizer = torch.optim.AdamW(groups, lr=TRAIN.lr, betas=betas, eps=TRAIN.eps, fused=True)

    def run(i: int) -> None:
        ids = batches[i % len(batches)].tokens_T.view(-1, batches[0].longest)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        training_update(model, optimizer, loss, TRAIN.clip)
        losses.append(loss.item())

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--sequence", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=30, help="timed steps")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--no-report", action="store_true", help="print only; write no result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batches = [batch(i, args.batch, args.sequence) for i in range(4)]
    model = initialise(Transformer(CONFIG), 0)
    with tempfile.TemporaryDirectory() as folder:
        write_hf(model, Path(folder) / "tour")
        peer = LlamaForCausalLM.from_pretrained(Path(folder) / "tour", dtype=torch.float32, attn_implementation="sdpa")
    assert isinstance(peer, LlamaForCausalLM)
    peer.train()
    assert sum(p.numel() for p in peer.parameters()) == CONFIG.parameters

    losses: dict[str, list[float]] = {"colonnade": [], "transformers": []}
    runs = {
        "colonnade": wall_clock(ours(model, batches, losses["colonnade"])),
        "transformers": wall_clock(theirs(peer, batches, losses["transformers"])),
    }
    neighbours = OtherProcesses()
    times = run_interleaved(runs, args.steps, warm_up=3)
    difference = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    assert difference < 1e-3, f"the losses differ by {difference}: not the same model, or not the same step"

    tokens = args.batch * args.sequence
    rows = [
        {
            "who": name,
            "step_ms": round(1e3 * statistics.median(took), 1),
            "tokens_per_s": round(tokens / statistics.median(took)),
            "gflops": round(
                tokens / statistics.median(took) * CONFIG.flops_per_token(args.sequence, causal=True) / 1e9
            ),
            "colonnade_speed_over_it": round(
                statistics.median(b / a for a, b in zip(times["colonnade"], took, strict=True)), 3
            ),
            "last_loss": round(losses[name][-1], 5),
        }
        for name, took in times.items()
    ]
    for row in rows:
        print(row)
    if args.no_report:
        return
    head = Headline(
        f"train the tour model ({CONFIG.parameters / 1e6:.1f} M) on a CPU, {args.batch} x {args.sequence} tokens",
        rows[0]["tokens_per_s"],
        "tokens/s",
        "transformers",
        rows[1]["tokens_per_s"],
    )
    notes = (
        f"{CONFIG.parameters / 1e6:.2f} M parameters, float32, {args.batch} sequences of {args.sequence} tokens, "
        f"{args.threads} threads; medians of {args.steps} alternating steps; largest difference of a loss between the "
        f"two {difference:.1e}; GFLOP/s count the causal half of the scores; {neighbours}."
    )
    report("train_cpu", rows, notes, headlines=[head])


if __name__ == "__main__":
    main()
