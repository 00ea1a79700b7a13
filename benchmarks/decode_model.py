"""Decoding speed of whole models on GPUs, against the bound of reading weights and KV cache once.

    python benchmarks/decode_model.py                                  # Llama-2-7B, batch 1, contexts of 512 to 32k
    python benchmarks/decode_model.py --model code-llama-34b --contexts 512 8192 32768 65536
    python benchmarks/decode_model.py --model mixtral-8x7b --tp 2 --etp 2             # one GPU per rank
    python benchmarks/decode_model.py --model llama-3-8b --cp 4 --page 256 --contexts 131072 1048576
    python benchmarks/decode_model.py --weights int4                   # quantised weights; or int8, float8
    python benchmarks/decode_model.py --batch-invariant                # the cost of serve.batch_invariant
    python benchmarks/decode_model.py --draw                           # redraw the plot from all records; no GPU
    python benchmarks/decode_model.py --tiny                           # toy sizes on a CPU: a smoke test

``--cp`` splits the KV cache over ranks: each rank has 1/cp of every context and all weights, so that a step reads the
weights and 1/cp of the keys. Small all-reduces and all-gathers are one kernel each; ``--nccl`` uses NCCL instead, for
comparison.

Weights are random bfloat16 values (the time does not depend on them), sampling is greedy, and steps are the engine's
own: input ids are written, a CUDA graph is replayed, and sampled ids are fed back without a host sync. The lower bound
of a step's time is

    (weights that it reads + keys and values of the context) / read bandwidth        measured in the same run

where one row of the embedding table is read, and of the experts those that are chosen; TB/s count these bytes, and
``of_bound`` is their share of the read bandwidth. For Llama models ``transformers``' ``generate`` with a static cache,
which it compiles, is measured at the first context. The plot shows tokens/s by context for all records, as in the
Flash-Decoding article.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from colonnade.bench.roofline import read_bytes
from colonnade.config import ModelConfig, Plan, WeightFormat, WeightGroup
from colonnade.config.feature_checks import check_quantised
from colonnade.config.presets import preset
from colonnade.model import KVCache, Transformer
from colonnade.model.weight_only_quant import build
from colonnade.parallel.axis import Axes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import launch
from colonnade.parallel.symmetric_memory import with_small_allreduce
from colonnade.serve.batch_invariance import make_batch_invariant
from colonnade.serve.cuda_graph_runner import CudaGraphRunner
from colonnade.serve.model_runner import ModelRunner, SampledTokens
from colonnade.serve.sample_args import SampleArgs
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.work import Slice, Work
from decoding.context_plot import draw
from decoding.decode_cells import read_bandwidth
from harness.report import RESULTS, ROOT, Cell, Headline, report
from harness.rows import format_row
from table import load

TINY = ModelConfig(vocab_size=97, layers=2, width=32, heads=4, kv_heads=2, ffn_width=48, context=128, family="llama")
GREEDY = SampleArgs.of(SamplingParams(temperature=0), 0, 0)
PAGE = 64
RECORD = re.compile(r"decode_.*_h200\.json")


def made(
    config: ModelConfig, axes: Axes, device: torch.device, dtype: torch.dtype, weights: str, group: int
) -> Transformer:
    """A model with random weights; quantised ones are made one matrix at a time."""
    on: dict[str, Any] = {"device": device, "dtype": dtype}
    if weights == "stored":
        model = Transformer(config, axes, **on).eval().requires_grad_(False)
        for weight in model.parameters():
            weight.normal_(std=0.02)
        return model
    model, assign = build(config, axes, **on, kind=weights, group=group)
    with torch.no_grad():
        for name, weight in [*model.named_parameters()]:
            value = torch.empty(weight.shape, **on).normal_(std=0.02)
            assign(name, weight, value)
    return model.eval().requires_grad_(False)


def stepper(
    model: Transformer, batch: int, context: int, steps: int, invariant: str | None, page: int
) -> Callable[[int], SampledTokens]:
    """Runs step i of at most ``steps``, starting at ``context`` keys with fed-back tokens."""
    device = next(model.parameters()).device
    each = -(-(context + steps + 8) // page)
    cache = KVCache(model.config, model.axes, pages=-(-batch * each // model.axes.cp.size) + 1, page_tokens=page,
                    dtype=next(model.parameters()).dtype, device=device)  # fmt: skip
    for pool in (*cache.k, *cache.v):
        pool.normal_()
    graphs = None
    if not invariant or device.type == "cuda":
        graphs = CudaGraphRunner(model, cache, batch, each * page, share=not invariant, kernels=invariant)
    run = ModelRunner(model, cache, graphs, share=not invariant, invariant=invariant)
    pages = [tuple(range(r * each, (r + 1) * each)) for r in range(batch)]

    def work(i: int) -> Work:
        start = context - 1 + i
        tokens = [(-1 - r,) if i else (1,) for r in range(batch)]
        used = start // page + 1
        return Work(tuple(Slice(start, t, p[:used], GREEDY) for t, p in zip(tokens, pages, strict=True)))

    return lambda i: run(work(i))


def steps_of(model: Transformer, batch: int, context: int, steps: int, invariant: str | None, page: int) -> float:
    """Seconds per step at about ``context`` keys: the median over three runs of ``steps`` steps."""
    device = next(model.parameters()).device
    step, number, taken = stepper(model, batch, context, 4 * steps, invariant, page), 0, []
    for measured in (False, True, True, True):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began, sampled = time.perf_counter(), None
        for _ in range(steps):
            sampled = step(number)
            number += 1
        assert sampled is not None
        sampled.tolist()
        if measured:
            taken.append((time.perf_counter() - began) / steps)
    return statistics.median(taken)


def ours(
    name: str,
    plan: Plan,
    batch: int,
    contexts: list[int],
    steps: int,
    device: str,
    weights: str,
    group: int,
    batch_invariant: bool,
    page: int,
    small: bool,
) -> list[dict[str, Any]]:
    """Runs on every rank; returns a row per context."""
    with DistributedContext.build(plan, device) as ctx:
        config = (TINY if name == "tiny" else preset(name)).replace(context=max(contexts) + 8 * steps)
        plan.check(config)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        check_quantised(config, weights, group, plan.tp)
        axes = ctx.axes.serving()
        axes = with_small_allreduce(axes, ctx.device) if small else axes
        model = made(config, axes, ctx.device, dtype, weights, group)
        invariant = make_batch_invariant(model) if batch_invariant else None
        bandwidth, read = read_bandwidth(device), read_bytes(model, batch)
        token_bytes = KVCache.bytes_per_page(config, ctx.axes, 1, dtype)
        rows = []
        for context in contexts:
            step_s = steps_of(model, batch, context, steps, invariant, page)
            step_bytes = read + batch * context * token_bytes / plan.cp
            bound_s = step_bytes / bandwidth
            rows.append(
                {
                    "who": "colonnade" if small else "colonnade, NCCL's small messages",
                    "model": name,
                    "weights": weights,
                    "batch_invariant": batch_invariant,
                    "ranks": plan.world,
                    "plan": str(plan),
                    "batch": batch,
                    "context": context,
                    "step_ms": round(1e3 * step_s, 3),
                    "tokens_per_s": round(batch / step_s, 1),
                    "bound_tokens_per_s": round(batch / bound_s, 1),
                    "tb_per_s": round(step_bytes / step_s / 1e12, 3),
                    "of_bound": round(bound_s / step_s, 4),
                    "bandwidth_tb_per_s": round(bandwidth / 1e12, 3),
                }
            )
            if ctx.rank == 0:
                print(format_row(rows[-1]), flush=True)
        return rows


def theirs(name: str, batch: int, context: int, steps: int, device: str) -> dict[str, Any]:
    """transformers with a static cache; the time per token is the difference of two answer lengths."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = TINY if name == "tiny" else preset(name)
    shape = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.width, intermediate_size=config.ffn_width,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        max_position_embeddings=context + 8 * steps, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(shape).to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
        prompt = torch.randint(config.vocab_size, (batch, context))
    taken: dict[int, float] = {}
    for count in (steps, 3 * steps):
        for _ in range(3):  # only the last one counts: the first two compile
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                           cache_implementation="static")  # fmt: skip
            if device == "cuda":
                torch.cuda.synchronize()
            taken[count] = time.perf_counter() - began
    step_s = (taken[3 * steps] - taken[steps]) / (2 * steps)
    row = {"who": "transformers, static cache", "model": name, "ranks": 1, "batch": batch, "context": context}
    return row | {"step_ms": round(1e3 * step_s, 3), "tokens_per_s": round(batch / step_s, 1)}


def measure(
    name: str,
    plan: Plan,
    batch: int,
    contexts: list[int],
    steps: int,
    device: str,
    *,
    peer: bool,
    weights: str = "stored",
    group: int = 64,
    batch_invariant: bool = False,
    page: int = PAGE,
    small: bool = True,
) -> tuple[list[dict[str, Cell]], list[Headline]]:
    how = (weights, group, batch_invariant, page, small)
    rows = launch(ours, (name, plan, batch, contexts, steps, device, *how), plan)
    beside = None
    if peer:
        try:
            beside = theirs(name, batch, contexts[0], steps, device)
            rows.append(beside)
        except (RuntimeError, ValueError, TypeError, AttributeError) as why:
            rows.append({"who": "transformers, static cache", "failed": str(why).splitlines()[0][:200]})
        print(format_row(rows[-1]), flush=True)
    first = rows[0]
    bits = ("" if weights == "stored" else f" in {weights}") + (", batch-invariant" if batch_invariant else "")
    gpus = f"{plan.world} GPU{'s' * (plan.world > 1)}" + (f" ({plan})" if plan.cp > 1 else "")
    what = f"Decode {name}{bits}, {gpus}, batch {batch}, {contexts[0]} tokens of context"
    speed = beside["tokens_per_s"] if beside else first["bound_tokens_per_s"]
    return rows, [Headline(what, first["tokens_per_s"], "tokens/s", beside["who"] if beside else "the bound", speed)]


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The newest row of each model, plan and context in this benchmark's records in ``folder``."""
    rows = dict[tuple[Any, ...], dict[str, Any]]()
    for record in sorted(load(folder), key=lambda record: record["date"]):
        if RECORD.fullmatch(record["file"]):
            for row in record["rows"]:
                parts = ("who", "model", "weights", "batch_invariant", "plan", "batch", "context")
                rows[tuple(row.get(part) for part in parts)] = row
    return [*rows.values()]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-2-7b", help="a preset")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks")
    parser.add_argument("--etp", type=int, default=1, help="ranks that split each expert's hidden units")
    parser.add_argument("--nccl", action="store_true", help="use NCCL for small messages too")
    parser.add_argument("--page", type=int, default=PAGE, help="tokens per page")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--weights", choices=get_args(WeightFormat), default="stored")
    parser.add_argument("--group", type=int, choices=get_args(WeightGroup), default=64, help="inputs per scale of int4")
    parser.add_argument("--batch-invariant", action="store_true", help="as with serve.batch_invariant")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--name", default="h200", help="machine name in the result's name; the plot shows h200")
    parser.add_argument("--picture", type=Path, help="default: docs/assets/decode_models.png, or in OUT if given")
    parser.add_argument("--draw", action="store_true", help="redraw the plot from the records")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU; writes no record")
    args = parser.parse_args(argv)
    picture = args.picture or (ROOT / "docs" / "assets" if args.out == RESULTS else args.out) / "decode_models.png"
    if args.draw:
        if not (rows := recorded(args.out)):
            parser.error(
                f"--draw plots existing records, and {args.out} has no record of this benchmark: measure first"
            )
        draw(rows, picture)
        print(picture)
        return
    plan = Plan(tp=args.tp, cp=args.cp, ep=args.ep, etp=args.etp)
    if args.tiny:
        measure("tiny", plan, args.batch, [16, 64], 4, "cpu", peer=plan.world == 1, weights=args.weights, group=32,
                batch_invariant=args.batch_invariant, page=8)  # fmt: skip
        return
    peer = not args.no_peer and plan.world == 1 and args.model.startswith("llama")
    rows, heads = measure(args.model, plan, args.batch, args.contexts, args.steps, "cuda", peer=peer,
                          weights=args.weights, group=args.group, batch_invariant=args.batch_invariant,
                          page=args.page, small=not args.nccl)  # fmt: skip
    bits = ("" if args.weights == "stored" else f"_{args.weights}") + ("_invariant" if args.batch_invariant else "")
    layout = f"tp{plan.tp}" + "".join(f"{n}{size}" for n in ("cp", "ep", "etp") if (size := getattr(plan, n)) > 1)
    layout += "_nccl" * args.nccl
    name = f"decode_{args.model}{bits}_{layout}_b{args.batch}_{args.name}"
    report(name, rows, notes=__doc__ or "", headlines=heads, folder=args.out)
    if args.name == "h200":
        draw(recorded(args.out), picture)


if __name__ == "__main__":
    main()
