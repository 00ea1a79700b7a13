"""Offline throughput of the engine against ``transformers``' continuous batching with the same weights.

    python benchmarks/engine.py                 # one GPU: 256 requests, a Qwen3-0.6B with random weights, bfloat16
    python benchmarks/engine.py --tiny          # a few short requests on a CPU: a smoke test

Prompts and answers have 100 to 1024 tokens each, from one seed; sampling is greedy, end tokens are ignored, and all
requests are submitted at the start: the workload by which small engines publish their speed. Only tokens of answers are
counted. Both sides get the requests one by one with their own numbers of tokens, are warmed up by requests of the same
sizes, and capture their CUDA graphs before the clock starts: ours one per batch size, as every engine of ours does on a
GPU (``serve.graph_capture``).

``idle`` is the share of time in which the GPU ran no kernel of ours, from a trace of steps 100 to 300, when requests
end. ``agree`` is the share of answers that are identical to the last token; in bfloat16 a near-tie can change the text.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

import colonnade
from colonnade.config import ServeConfig
from colonnade.serve import Engine, SamplingParams
from colonnade.train.profiler import total_length, union
from harness.engine_load import EngineRun, Load, all_batch_sizes, print_run, random_load, run_colonnade, word_tokenizer
from harness.paired_timing import run_interleaved
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import format_row


def peer(tiny: bool) -> Qwen3ForCausalLM:
    """A transformers model with random weights, in a shape that both sides support."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}  # fmt: skip
    if tiny:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300}  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("cpu" if tiny else "cuda"):
        return Qwen3ForCausalLM(config).to(torch.float32 if tiny else torch.bfloat16).eval()


def theirs(model: Qwen3ForCausalLM, load: Load, settings: ContinuousBatchingConfig) -> EngineRun:
    generation = GenerationConfig(do_sample=False, max_new_tokens=max(load.counts), eos_token_id=-1, pad_token_id=0)
    # Its graphs are captured before the clock starts, as its own generate_batch does.
    with model.continuous_batching_context_manager(
        generation, continuous_batching_config=settings, timeout=5
    ) as manager:
        began = time.perf_counter()
        ids = [
            manager.add_request(prompt, max_new_tokens=count)
            for prompt, count in zip(load.prompts, load.counts, strict=True)
        ]
        found: dict[str, list[int]] = {}
        while len(found) < len(ids):
            result = manager.get_result(timeout=5)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' generation thread ended before its work was done")
            elif result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
        return print_run("transformers", EngineRun(time.perf_counter() - began, [found[i] for i in ids]))


def idle(engine: Engine, load: Load, skip: int, steps: int) -> float:
    """The share of time in which the device was idle during ``steps`` engine steps, after ``skip``.

    On a GPU only kernels are traced, because tracing the host would slow it down.
    """
    for prompt, count in zip(load.prompts, load.counts, strict=True):
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    for _ in range(skip):
        engine.step()
    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as traced:
            for _ in range(steps):
                engine.step()
        traced.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if gpu else ("cpu_op",)
    busy = union((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and e.get("cat") in kinds)
    for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.cancel(request.id)
    return 1 - total_length(busy) / (busy[-1][1] - busy[0][0])


def measure(tiny: bool, requests: int, rounds: int) -> tuple[list[dict[str, Cell]], list[Headline]]:
    least, most = (4, 12) if tiny else (100, 1024)
    model = peer(tiny)
    vocab_size = model.config.vocab_size
    load = random_load(requests, least, most, vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        mine = colonnade.load(folder, dtype="float32" if tiny else "bfloat16", device="cpu" if tiny else "cuda")
    limits = ServeConfig(
        max_requests=requests, token_budget=64 if tiny else 8192, cache_bytes=1 << (22 if tiny else 36)
    )  # fmt: skip
    # Random prompts share nothing, except with the previous run of the same load, which must not count.
    engine = Engine(mine.transformer, word_tokenizer(vocab_size), limits.replace(prefix_cache=False))
    runs: dict[str, Callable[[int], EngineRun]] = {
        "colonnade": lambda _: run_colonnade(engine, load),
        "transformers": lambda _: theirs(model, load, ContinuousBatchingConfig()),
    }
    print(f"{requests} requests, {sum(map(len, load.prompts))} tokens in, {load.tokens} out", flush=True)
    few = load.first(max(2, requests // 16))
    for what, warm_up in (
        ("colonnade, some requests", lambda: run_colonnade(engine, few)),
        ("colonnade, every batch size", lambda: run_colonnade(engine, all_batch_sizes(requests))),
        ("transformers, some requests", lambda: theirs(model, few.short(32), ContinuousBatchingConfig())),
    ):
        print(f"warming up: {what}", flush=True)
        warm_up()
    took = run_interleaved(runs, rounds, warm_up=0)
    waits = idle(engine, load, skip=4 if tiny else 100, steps=4 if tiny else 200)
    agree = statistics.mean(
        a == b for a, b in zip(took["colonnade"][0].answers, took["transformers"][0].answers, strict=True)
    )
    assert all(len(a) == n for a, n in zip(took["colonnade"][0].answers, load.counts, strict=True))
    rows: list[dict[str, Cell]] = []
    for who, each in took.items():
        seconds = statistics.median(one.seconds for one in each)
        rows.append(
            {
                "who": who,
                "requests": requests,
                "tokens_in": sum(map(len, load.prompts)),
                "tokens_out": load.tokens,
                "seconds": round(seconds, 3),
                "tokens_per_s": round(load.tokens / seconds, 1),
                "idle": round(waits, 4) if who == "colonnade" else None,
                "agree": round(agree, 4) if who == "colonnade" else None,
            }
        )
        print(format_row(rows[-1]), flush=True)
    speed = {row["who"]: float(row["tokens_per_s"] or 0) for row in rows}
    what = f"Engine, {requests} requests of {least} to {most} tokens in and out, Qwen3-0.6B, bfloat16"
    heads = [Headline(what, speed["colonnade"], "tokens/s", "transformers", speed["transformers"])]
    return rows, heads


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU; writes no record")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    rows, heads = measure(args.tiny, args.requests or (6 if args.tiny else 256), args.rounds)
    if not args.tiny:
        report("engine_h200", rows, notes=f"{args.rounds} round(s), alternating", headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()
