"""Time of each kernel of a decode step, and the gaps between them, from a profiler trace.

    python benchmarks/step_profile.py                          # Llama-2-7B, bfloat16, int8 and int4, 512 keys
    python benchmarks/step_profile.py --model llama-3-8b --batch 8 --contexts 512 8192
    python benchmarks/step_profile.py --weights int4           # one format alone
    python benchmarks/step_profile.py --tiny                   # a smoke test on a CPU: operators, not kernels

Steps run as in the engine (a CUDA graph is replayed, a token sampled, the next step's input written) under torch's
profiler. The kernels of a layer are found as the sequence that repeats once per layer. Each position in it is a row:
the kernel, its mean time, and the idle gap before it. ``bytes`` are those that it must read, where known: the weights
of a GEMM, the keys and values of attention. Kernels outside the layers (embedding, output projection, sampling, copies)
have one row per name, for a whole step. The step time is measured without the profiler, which widens the gaps a little.
"""

import argparse
import itertools
import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch.profiler import ProfilerActivity, profile

from colonnade.config import ModelConfig, WeightFormat, WeightGroup
from colonnade.config.presets import preset
from colonnade.model import KVCache, Transformer
from colonnade.model.ffn import FeedForward
from colonnade.model.tensor_parallel_linear import Linear
from colonnade.model.transformer import Block
from colonnade.parallel.axis import SOLO_AXES
from decode_model import TINY, made, stepper, steps_of
from decoding.decode_cells import read_bandwidth
from harness.report import RESULTS, Cell, Headline, report

PRODUCT = re.compile(
    r"gemm|gemv|nvjet|cutlass|dot_kernel|^skinny|^tensor_core|^split_k|^_linear|^aten::mm|^aten::addmm", re.I
)
"""Names of GEMM kernels, which read a weight; the reductions of split-K GEMMs do not."""
NO_PRODUCT = re.compile(r"reduce|splitk_?sum", re.I)
ATTENTION = re.compile(r"^attend|fmha|flash|sdpa")


class Kernel(NamedTuple):
    """One kernel in a trace."""

    name: str
    began_us: float
    us: float


def read_kernels(path: Path, gpu: bool) -> list[Kernel]:
    """The kernels of a profiler trace in order; on a CPU the operators that call no other."""
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"} if gpu else {"cpu_op"}
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = sorted(
        (Kernel(e["name"], float(e["ts"]), float(e["dur"])) for e in events if e.get("cat") in kinds),
        key=lambda kernel: (kernel.began_us, -kernel.us),
    )
    if gpu:
        return found
    return [a for a, b in itertools.pairwise([*found, Kernel("", 1e30, 0)]) if b.began_us >= a.began_us + a.us]


def layers_in(names: Sequence[str], layers: int, steps: int) -> tuple[int, list[int]]:
    """(number of kernels per layer, start of every layer): the shortest sequence repeating ``layers`` times per step.

    The first layer may be missing, since it may contain work for all layers. Raises ValueError if nothing repeats.
    """
    for period in range(1, len(names) // max(1, layers * steps) + 1):
        alike = [a == b for a, b in zip(names, names[period:], strict=False)]
        starts, at = [], 0
        for same, run in itertools.groupby(alike):
            length = len(list(run))
            if same and length >= (layers - 2) * period:
                starts.append((at, min(layers, length // period + 1)))
            at += length
        if len(starts) == steps:
            return period, [at + i * period for at, count in starts for i in range(count)]
    raise ValueError(f"no sequence of kernels repeats {layers} times in {steps} steps; do its layers differ?")


def weights_of(block: Block) -> list[list[int]]:
    """Bytes of a block's matrices in GEMM order: one kernel each, and with gate and up in one kernel."""

    def size(layer: Any) -> int:
        assert isinstance(layer, Linear)
        return layer.weight.nbytes if layer.quantised is None else layer.quantised.nbytes

    if not isinstance(block.ffn, FeedForward) or not hasattr(block.attention, "qkv"):
        return []
    before, ffn = [size(block.attention.qkv), size(block.attention.out)], block.ffn
    if ffn.gate is None:
        return [[*before, size(ffn.up), size(ffn.down)]]
    gate, up, down = size(ffn.gate), size(ffn.up), size(ffn.down)
    return [[*before, up, gate, down], [*before, gate + up, down]]


def bytes_of(names: Sequence[str], block: Block, keys_bytes: int) -> list[int | None]:
    """Bytes that each kernel of a layer must read, where known."""
    products = [i for i, name in enumerate(names) if PRODUCT.search(name) and not NO_PRODUCT.search(name)]
    found: list[int | None] = [None] * len(names)
    for sizes in weights_of(block):
        if len(sizes) == len(products):
            for i, size in zip(products, sizes, strict=True):
                found[i] = size
    attention = [i for i, name in enumerate(names) if ATTENTION.search(name)]
    if len(attention) == 1:
        found[attention[0]] = keys_bytes
    return found


def rows_of(
    kernels: Sequence[Kernel], block: Block, layers: int, steps: int, keys_bytes: int, bandwidth: float
) -> list[dict[str, Cell]]:
    """A row for each kernel of a layer, and for each kernel name outside the layers."""
    period, starts = layers_in([kernel.name for kernel in kernels], layers, steps)
    inside = {start + i for start in starts for i in range(period)}
    gaps = [0.0] + [max(0.0, b.began_us - a.began_us - a.us) for a, b in itertools.pairwise(kernels)]
    names = [kernels[starts[0] + i].name for i in range(period)]
    rows: list[dict[str, Cell]] = []
    for i, (name, size) in enumerate(zip(names, bytes_of(names, block, keys_bytes), strict=True)):
        at = [start + i for start in starts]
        us = statistics.fmean(kernels[j].us for j in at)
        rows.append(
            {
                "where": "layer",
                "place": i,
                "kernel": name[:120],
                "count": 1,
                "us": round(us, 3),
                "gap_us": round(statistics.fmean(gaps[j] for j in at), 3),
                "bytes": size,
                "tb_per_s": size and round(size / us / 1e6, 3),
                "of_read": size and round(size / us / 1e-6 / bandwidth, 3),
            }
        )
    outside = [i for i in range(len(kernels)) if i not in inside]
    for name in dict.fromkeys(kernels[i].name for i in outside):
        at = [i for i in outside if kernels[i].name == name]
        rows.append(
            {
                "where": "step",
                "place": None,
                "kernel": name[:120],
                "count": round(len(at) / steps, 2),
                "us": round(sum(kernels[i].us for i in at) / steps, 3),
                "gap_us": round(sum(gaps[i] for i in at) / steps, 3),
                "bytes": None,
                "tb_per_s": None,
                "of_read": None,
            }
        )
    return rows


def profiled(model: Transformer, batch: int, context: int, steps: int, page: int, bandwidth: float) -> list[dict]:
    """The rows of one model at one context, with a row for the whole step."""
    gpu = next(model.parameters()).is_cuda
    step_ms = 1e3 * steps_of(model, batch, context, max(4, steps), None, page)
    step = stepper(model, batch, context, 2 * steps, None, page)
    for i in range(steps):
        step(i).tolist()
    kinds = [ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=kinds) as trace:
            drawn = [step(steps + i) for i in range(steps)]
            drawn[-1].tolist()
        trace.export_chrome_trace(str(Path(folder) / "trace.json"))
        kernels = read_kernels(Path(folder) / "trace.json", gpu)
    block, config = model.blocks[0], model.config
    assert isinstance(block, Block)
    dtype = next(model.parameters()).dtype
    keys_bytes = batch * context * KVCache.bytes_per_page(config, SOLO_AXES, 1, dtype) // config.layers
    rows = rows_of(kernels, block, config.layers, steps, keys_bytes, bandwidth)
    inside = [row for row in rows if row["where"] == "layer"]
    layer_us, gap_us = (sum(float(row[key]) for row in inside) for key in ("us", "gap_us"))
    rows.append(
        {
            "where": "whole step",
            "place": None,
            "kernel": f"{len(inside)} kernels per layer, {layer_us:.1f} µs and {gap_us:.1f} µs between them",
            "count": 1,
            "us": round(1e3 * step_ms, 1),
            "gap_us": None,
            "bytes": None,
            "tb_per_s": None,
            "of_read": None,
        }
    )
    return rows


def show(rows: Sequence[dict[str, Cell]]) -> None:
    """Print the rows as a table."""
    print(f"{'':>10} {'count':>6} {'us':>9} {'gap':>7} {'MB':>8} {'TB/s':>6} {'of read':>7}  kernel")
    for row in rows:
        size = row["bytes"]
        known = f"{float(size) / 1e6:>8.2f} {row['tb_per_s']:>6} {row['of_read']:>7}" if size else " " * 23
        gap = "" if row["gap_us"] is None else row["gap_us"]
        print(f"{row['where']:>10} {row['count']:>6} {row['us']:>9} {gap:>7} {known}  {str(row['kernel'])[:70]}")


def measure(
    name: str, config: ModelConfig, kinds: Sequence[str], batch: int, contexts: Sequence[int], steps: int, device: str,
    group: int,
) -> tuple[list[dict[str, Cell]], list[Headline]]:  # fmt: skip
    dtype, page = (torch.bfloat16, 64) if device == "cuda" else (torch.float32, 8)
    bandwidth = read_bandwidth(device)
    found: list[dict[str, Cell]] = []
    heads = []
    for weights in kinds:
        model = made(config, SOLO_AXES, torch.device(device), dtype, weights, group)
        for context in contexts:
            rows = profiled(model, batch, context, steps, page, bandwidth)
            print(
                f"{name}, {weights}, batch {batch}, {context} keys; {bandwidth / 1e12:.2f} TB/s read bandwidth",
                flush=True,
            )
            show(rows)
            found += [{"model": name, "weights": weights, "batch": batch, "context": context, **row} for row in rows]
            layers = sum(float(row["us"] or 0) + float(row["gap_us"] or 0) for row in rows if row["where"] == "layer")
            heads.append(
                Headline(f"A layer of {name}, {weights}, batch {batch}, {context} keys", round(layers, 1), "µs")
            )
        del model
    return found, heads


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-2-7b", help="a preset")
    parser.add_argument("--weights", choices=get_args(WeightFormat), nargs="+", default=["stored", "int8", "int4"])
    parser.add_argument("--group", type=int, choices=get_args(WeightGroup), default=64, help="inputs per scale of int4")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512])
    parser.add_argument("--steps", type=int, default=10, help="profiled steps")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU; writes no record")
    args = parser.parse_args(argv)
    if args.tiny:
        measure("tiny", TINY.replace(layers=4), args.weights, args.batch, [16], 3, "cpu", 32)
        return
    if not torch.cuda.is_available():
        print("step_profile.py needs a GPU, and this machine has none; --tiny is a smoke test on a CPU")
        return
    config = preset(args.model).replace(context=max(args.contexts) + 8 * max(4, args.steps))
    how = (args.batch, args.contexts, args.steps, "cuda", args.group)
    rows, heads = measure(args.model, config, args.weights, *how)
    name = f"step_profile_{args.model}_b{args.batch}_h200"
    report(name, rows, notes=__doc__ or "", headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()
