"""Encoder–decoders on one GPU in bfloat16, against transformers on the same random weights.

    python benchmarks/encoder_decoder.py train      # T5-large: sources of 512 tokens, targets of 114
    python benchmarks/encoder_decoder.py serve      # T5-large: 256 requests, and the padded batch of all of them
    python benchmarks/encoder_decoder.py experts    # the layer of experts of Switch-base-8, forward and backward
    python benchmarks/encoder_decoder.py train --tiny      # toy sizes on a CPU: a smoke test

**train** Ours: float32 masters, bfloat16 compute, fused AdamW, each block compiled, with and without a CUDA graph of
forward and backward (``train.cuda_graph``). Theirs: parameters, gradients and AdamW in bfloat16 (less memory traffic,
less precise), each block compiled. Both: no dropout, clipping at 1, equal random pairs. A step is forward, backward,
clip, AdamW; times are medians by CUDA events.

**serve** Sources have 16 to 512 tokens and targets 8 to 256, log-uniform. Greedy, without end tokens. Ours: the engine,
all requests at once. Theirs: one padded batch, which runs until the longest target; tokens beyond a request's own
target do not count. ``cuda_graphs`` says whether ours captured its decode steps.

**experts** 32 sequences of 512 tokens, capacity 64 an expert and sequence, on equal weights and tokens: our layer with
its router, and transformers' ``SwitchTransformersSparseMLP``, eager (its loop over experts reads the choices on the
host, so that it cannot be compiled as one graph) and compiled with graph breaks.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from colonnade.config import ModelConfig, ServeConfig, TrainConfig
from colonnade.config.presets import preset
from colonnade.data import Batch
from colonnade.data.pairs import pack_pairs
from colonnade.data.tokenizer import Tokenizer
from colonnade.model import Transformer
from colonnade.model.moe.capacity import TokenGroups
from colonnade.model.moe.layer import MixtureOfExperts
from colonnade.model.moe.routing_context import LayerRouting, Routing
from colonnade.parallel.axis import SOLO, SOLO_AXES
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters
from colonnade.serve import Engine, SamplingParams
from colonnade.train.train_step import TrainStep
from colonnade.train.training_state import make_optimizer
from harness.report import Headline, folder_of, report
from harness.rows import format_row
from harness.torch_training import training_update
from harness.training_jobs import durations, free_memory, peak_gib, random_weights, synchronize

SOURCE, TARGET = 512, 114
TINY = {"vocab_size": 128, "layers": 2, "width": 32, "heads": 2, "head_width": 16, "ffn_width": 64}


def config_of(name: str, *, tiny: bool) -> ModelConfig:
    config = preset(name)
    if not tiny:
        return config
    assert config.encoder is not None
    encoder = config.encoder.replace(layers=2, ffn_width=0)
    moe = config.moe and config.moe.replace(ffn_width=64)
    return config.replace(**TINY, encoder=encoder, moe=moe)


def hf_config(config: ModelConfig, kind: Any, **more: Any) -> Any:
    """The T5 or Switch of the same sizes; dropout 0."""
    assert config.encoder is not None
    return kind(
        vocab_size=config.vocab_size, d_model=config.width, d_kv=config.head_width, num_heads=config.heads,
        d_ff=config.ffn_width, num_layers=config.encoder.layers, num_decoder_layers=config.layers, dropout_rate=0.0,
        **more,
    )  # fmt: skip


# -- training ----------------------------------------------------------------------------------------------------------


def pairs(config: ModelConfig, count: int, sizes: tuple[int, int], seed: int, device: str) -> Batch:
    draw = np.random.default_rng(seed)
    made = [tuple(draw.integers(2, config.vocab_size, size) for size in sizes) for _ in range(count)]
    return pack_pairs(made, 0, max(sizes)).to(torch.device(device))  # type: ignore[arg-type]


def our_step(
    config: ModelConfig, batches: list[Batch], device: str, *, cuda_graph: bool = False
) -> Callable[[int], Tensor]:
    dtype = "bfloat16" if device == "cuda" else "float32"
    train = TrainConfig(
        steps=1000, lr=1e-4, min_lr=0, warmup=0, weight_decay=0.01, dtype=dtype, fused_adamw=device == "cuda"
    )
    context = DistributedContext.solo(device)
    model = random_weights(Transformer(config, device=device))
    weights = masters(model, context, getattr(torch, dtype), single=bool(train.fused_adamw))
    step = TrainStep(model, weights, make_optimizer(weights, train), train, SOLO, cuda_graph=cuda_graph)
    if device == "cuda":
        for block in (*model.blocks, *model.encoder_blocks):
            block.compile()
    return lambda i: step(i, [batches[i % len(batches)]]).loss_sum / len(batches[0].tokens_T)


def their_step(config: ModelConfig, batches: list[Batch], device: str) -> Callable[[int], Tensor]:
    with torch.device(device):
        model = transformers.T5ForConditionalGeneration(hf_config(config, transformers.T5Config))
    model = model.to(torch.bfloat16 if device == "cuda" else torch.float32).train()
    model.config.use_cache = False
    if device == "cuda":
        for block in (*model.encoder.block, *model.decoder.block):
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=device == "cuda")

    def step(i: int) -> Tensor:
        batch = batches[i % len(batches)]
        assert batch.source_tokens_S is not None
        ids = batch.source_tokens_S.view(-1, batch.longest_source)
        inputs, labels = (x.view(-1, batch.longest) for x in (batch.tokens_T, batch.targets_T))
        loss = model(input_ids=ids, decoder_input_ids=inputs, labels=labels, use_cache=False).loss
        training_update(model, optimizer, loss)
        return loss.detach()

    return step


def train(args: argparse.Namespace, device: str) -> tuple[list[dict], list[Headline], str]:
    config = config_of("t5-large", tiny=args.tiny)
    sizes, count = ((16, 8), 2) if args.tiny else ((SOURCE, TARGET), args.batch)
    batches = [pairs(config, count, sizes, seed, device) for seed in range(2)]
    rows = []
    graphed = partial(our_step, cuda_graph=device == "cuda")
    runs = {"colonnade, CUDA graph": graphed, "colonnade": our_step, "transformers, compiled": their_step}
    for who, build in runs.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        step = build(config, batches, device)
        first, *_ = [float(step(i)) for i in range(4)]
        synchronize(torch.device(device))
        warm_s = time.perf_counter() - began
        step_s = statistics.median(durations(lambda i, step=step: step(4 + i), args.steps, torch.device(device)))
        rate = count * sum(sizes) / step_s
        rows.append({
            "who": who, "pairs": count, "step_ms": round(1e3 * step_s, 2), "tokens_per_s": round(rate),
            "first_loss": round(first, 4), "peak_gib": peak_gib(torch.device(device)), "warm_up_s": round(warm_s, 1),
        })  # fmt: skip
        print(format_row(rows[-1]), flush=True)
        if args.profile and build is our_step:
            profile(lambda step=step: step(0), args.profile)
        del step
        free_memory(torch.device(device))
    ours, theirs = rows[0], rows[-1]
    head = Headline(
        f"T5-large, training, {count} pairs of {sizes[0]} and {sizes[1]} tokens, tokens/s", ours["tokens_per_s"],
        "tokens/s", theirs["who"], theirs["tokens_per_s"],
    )  # fmt: skip
    return rows, [head], "tokens of sources and targets"


def profile(run: Callable[[], Any], path: Path) -> None:
    """Write a table of the kernels of one call."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as trace:
        run()
        torch.cuda.synchronize()
    table = trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=80)
    path.write_text(table, "utf-8")


# -- serving -----------------------------------------------------------------------------------------------------------


def plain_tokenizer(vocab_size: int) -> Tokenizer:
    """A word for each id; 1 is the end."""
    import tokenizers

    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    return Tokenizer(core, None, (1,))


def log_uniform(draw: random.Random, low: int, high: int) -> int:
    return round(low * (high / low) ** draw.random())


def serve(args: argparse.Namespace, device: str) -> tuple[list[dict], list[Headline], str]:
    config = config_of("t5-large", tiny=args.tiny)
    draw, dtype = random.Random(0), torch.bfloat16 if device == "cuda" else torch.float32
    count, longest = (8, (40, 9)) if args.tiny else (args.requests, (500, 256))
    sources = [
        [draw.randrange(2, config.vocab_size) for _ in range(log_uniform(draw, 16, longest[0]))] for _ in range(count)
    ]
    wanted = [log_uniform(draw, 4 if args.tiny else 8, longest[1]) for _ in sources]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in wanted]
    rows: list[dict] = []
    model = random_weights(Transformer(config, device=device)).to(dtype).eval().requires_grad_(False)
    sizes = {"max_requests": count, "max_waiting": 2 * count, "token_budget": 64 if args.tiny else 16384}
    pages = {"pages": 64, "page_tokens": 8} if args.tiny else {}
    engine = Engine(model, plain_tokenizer(config.vocab_size), ServeConfig(**sizes, **pages))
    found, ours_s = [], 0.0
    for _ in range(2):  # the first compiles kernels and captures graphs
        synchronize(torch.device(device))
        began = time.perf_counter()
        found = engine.generate(sources, params)
        ours_s = time.perf_counter() - began
    assert [len(each.token_ids) for each in found] == wanted
    graphs = engine.core.runner.graphs is not None
    rows.append(row("colonnade", sum(wanted), ours_s) | {"cuda_graphs": graphs, "steps": engine.stats.steps // 2})
    print(format_row(rows[-1]), flush=True)
    if args.profile:
        profile(partial(engine.generate, sources[:64], params[:64]), args.profile)
    del engine, model
    free_memory(torch.device(device))

    with torch.device(device):
        other = transformers.T5ForConditionalGeneration(hf_config(config, transformers.T5Config)).to(dtype).eval()
    width = max(map(len, sources)) + 1
    ids = torch.tensor([[*source, 1, *([0] * (width - 1 - len(source)))] for source in sources], device=device)
    mask = torch.arange(width, device=device) < torch.tensor([[len(s) + 1] for s in sources], device=device)
    how = transformers.GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=0, decoder_start_token_id=0, max_new_tokens=max(wanted),
    )  # fmt: skip
    warm = transformers.GenerationConfig(**{**how.to_diff_dict(), "max_new_tokens": 3, "eos_token_id": None})
    with torch.inference_mode():
        other.generate(ids, attention_mask=mask.long(), generation_config=warm)
        synchronize(torch.device(device))
        began = time.perf_counter()
        out = other.generate(ids, attention_mask=mask.long(), generation_config=how)
        synchronize(torch.device(device))
        theirs_s = time.perf_counter() - began
    assert out.shape[1] == max(wanted) + 1, out.shape
    rows.append(row("transformers, padded batch", sum(wanted), theirs_s) | {"steps": max(wanted)})
    print(format_row(rows[-1]), flush=True)
    head = Headline(
        f"T5-large, {count} requests, generated tokens/s", rows[0]["tokens_per_s"], "tokens/s", rows[1]["who"],
        rows[1]["tokens_per_s"],
    )  # fmt: skip
    return rows, [head], f"{sum(map(len, sources)):,} tokens of sources"


def row(who: str, tokens: int, seconds: float) -> dict:
    return {"who": who, "tokens": tokens, "seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds)}


# -- experts -----------------------------------------------------------------------------------------------------------


def experts(args: argparse.Namespace, device: str) -> tuple[list[dict], list[Headline], str]:
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    config = config_of("switch-base-8", tiny=args.tiny)
    moe, dtype = config.moe, torch.bfloat16 if device == "cuda" else torch.float32
    assert moe is not None
    count, length = (3, 40) if args.tiny else (32, SOURCE)
    shape = hf_config(config, transformers.SwitchTransformersConfig, num_experts=moe.experts,
                      expert_capacity=moe.capacity_tokens, router_jitter_noise=0.0)  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        theirs = SwitchTransformersSparseMLP(shape).to(dtype).train()
        ours = MixtureOfExperts(config, moe, SOLO_AXES, device=torch.device(device), dtype=dtype)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.normal_(0, 0.3 if "router" in name else 0.03)
        ours.router.gates[0].weight.copy_(theirs.router.classifier.weight)
        each = [theirs.experts[f"expert_{e}"] for e in range(moe.experts)]
        stacked = [torch.stack([getattr(one, part).weight for one in each]) for part in ("wi", "wo")]
        ours.experts.up.copy_(stacked[0])
        ours.experts.down.copy_(stacked[1].transpose(1, 2))
    x_BTD = torch.randn(count, length, config.width, device=device, dtype=dtype).requires_grad_()
    T = count * length
    ends = torch.arange(count + 1, device=device, dtype=torch.int32) * length
    groups = TokenGroups.sequences(ends, T, SOLO)
    tokens_T = torch.zeros(T, dtype=torch.int64, device=device)
    routing = LayerRouting(tokens_T, Routing(torch.arange(T, device=device), token_groups=groups), None)

    def our_run() -> Tensor:
        return ours(x_BTD.view(T, -1), T, routing, None)[0].view_as(x_BTD)

    compiled = torch.compile(theirs)
    runs = {"colonnade": our_run, "transformers, eager": lambda: theirs(x_BTD),
            "transformers, compiled": lambda: compiled(x_BTD)}  # fmt: skip
    with torch.no_grad():
        want, got = theirs(x_BTD).float(), our_run().float()
        difference = float((got - want).norm() / want.norm())
    weight = torch.randn_like(x_BTD)
    rows: list[dict] = []
    for who, run in runs.items():
        for what in ("forward", "forward and backward"):

            def once(_: int, run: Callable[[], Tensor] = run, what: str = what) -> None:
                if what == "forward":
                    with torch.no_grad():
                        run()
                else:
                    (run() * weight).sum().backward()

            try:
                for i in range(5):
                    once(i)
                synchronize(torch.device(device))
                spent_s = statistics.median(durations(once, 5 if args.tiny else 30, torch.device(device)))
            except RuntimeError as why:
                print(f"{who}: {str(why).splitlines()[0]}", flush=True)
                continue
            rows.append({"who": who, "what": what, "tokens": T, "ms": round(1e3 * spent_s, 3),
                         "difference": round(difference, 5) if who == "colonnade" else None})  # fmt: skip
            print(format_row(rows[-1]), flush=True)
    ours_ms = next(each["ms"] for each in rows if each["what"] != "forward")
    best = min((r for r in rows if r["who"] != "colonnade" and r["what"] != "forward"), key=lambda r: r["ms"])
    what = f"experts of Switch-base-8, {T:,} tokens, forward and backward"
    head = Headline(what, ours_ms, "ms", best["who"], best["ms"])
    return rows, [head], "relative difference of the outputs by norm, in the compute type"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "serve", "experts"])
    parser.add_argument("--batch", type=int, default=32, help="pairs per step")
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tiny", action="store_true", help="toy sizes on a CPU: a smoke test")
    parser.add_argument("--out", type=Path, help="folder of the result; default benchmarks/results")
    parser.add_argument("--profile", type=Path, help="file for a table of our kernels")
    args = parser.parse_args()
    device = "cpu" if args.tiny else "cuda"
    rows, headlines, notes = {"train": train, "serve": serve, "experts": experts}[args.what](args, device)
    gpu = "" if args.tiny else torch.cuda.get_device_name()
    suffix = "tiny" if args.tiny else next(word for word in gpu.split() if any(c.isdigit() for c in word)).lower()
    name = f"encoder_decoder_{args.what}_{suffix}"
    report(name, rows, notes, headlines=headlines, folder=folder_of(args.out, toy=args.tiny))


if __name__ == "__main__":
    main()
