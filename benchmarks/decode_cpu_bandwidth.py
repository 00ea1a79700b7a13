"""Decoding of large models on a CPU, one request at a time, as a share of the speed at which memory delivers weights.

    python benchmarks/decode_cpu_bandwidth.py                                     # 1B- and 8B-shaped models, all cores
    python benchmarks/decode_cpu_bandwidth.py --models llama-3.2-1b --weights int8 int4 --seconds 3
    python benchmarks/decode_cpu_bandwidth.py --tiny                              # a toy: a smoke test, no record

Weights are random (the time does not depend on them): one matrix of each shape is drawn and quantised, and copied for
each layer, so that no two layers share memory. The bound of a step is (weights that it reads + keys and values) / read
bandwidth; bandwidth is that of the fastest of torch's reductions on the same threads, measured before each model.
Steps are those of the engine, greedy, with contexts of 16 to 256 tokens.
"""

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor

from colonnade import api
from colonnade.bench.ceilings import BUFFER_BYTES, read_bandwidth
from colonnade.bench.roofline import PROMPT_TOKENS, read_bytes, step_seconds
from colonnade.config import ModelConfig, ServeConfig
from colonnade.config.presets import preset
from colonnade.kernels.linear.quantise import Quantised
from colonnade.model import KVCache, Transformer
from colonnade.model.weight_only_quant import build, stored_quantised
from colonnade.parallel.axis import Axes
from colonnade.parallel.distributed_context import DistributedContext
from decode_model import TINY
from harness.engine_load import words
from harness.paired_timing import Neighbours
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import figures, line

KINDS = ("bfloat16", "int8", "int4")
GROUP = 32
PAGE = 16
CPU = torch.device("cpu")


def filled(weight: Tensor, block: Tensor) -> None:
    """Copy ``block`` into ``weight`` again and again."""
    flat = weight.view(-1)
    whole = len(flat) // len(block) * len(block)
    flat[:whole].view(-1, len(block)).copy_(block)
    flat[whole:].copy_(block[: len(flat) - whole])


def random_model(config: ModelConfig, kind: str) -> Transformer:
    """A model with random weights in ``kind``."""
    block = torch.empty(1 << 20, dtype=torch.bfloat16).normal_(std=0.02)
    if kind == "bfloat16":
        model = Transformer(config, Axes(), device=CPU, dtype=torch.bfloat16)
        with torch.no_grad():
            for weight in model.parameters():
                filled(weight, block)
        return model.eval().requires_grad_(False)
    model, store = build(config, Axes(), device=CPU, dtype=torch.bfloat16, kind=kind, group=GROUP)  # type: ignore[arg-type]
    drawn: dict[tuple[int, ...], Quantised] = {}
    with torch.no_grad():
        for name, weight in [*model.named_parameters()]:
            if known := drawn.get(weight.shape):
                copy = known._replace(values=known.values.clone(), scales=known.scales.clone())
                store(name, weight, copy)
                continue
            value = torch.empty(weight.shape, dtype=torch.bfloat16)
            filled(value, block)
            store(name, weight, value)
            if new := stored_quantised(model).get(name):
                if name not in ("unembed.weight", "embed.tokens.weight"):  # in int8, also where the blocks are in int4
                    drawn[tuple(weight.shape)] = new
    return model.eval().requires_grad_(False)


def measure(name: str, config: ModelConfig, kind: str, seconds: float, bandwidth: float) -> dict[str, Cell]:
    """A row for one model and format."""
    transformer = random_model(config, kind)
    model = api.Model(transformer, words(config.vocab_size), DistributedContext.solo(), name)
    pages = -(-(PROMPT_TOKENS + 240) // PAGE) + 1
    steps = step_seconds(model, ServeConfig(max_requests=1, page_tokens=PAGE, pages=pages), seconds)
    keys = KVCache.bytes_per_page(config, transformer.axes, 1, torch.bfloat16)
    size = read_bytes(transformer, 1) + (PROMPT_TOKENS + len(steps) / 2) * keys
    step_s = statistics.median(steps)
    row: dict[str, Cell] = {
        "model": name,
        "weights": kind,
        "threads": torch.get_num_threads(),
        "mb_per_token": figures(size / 1e6),
        "tokens_per_s": figures(1 / step_s),
        "bound_tokens_per_s": figures(bandwidth / size),
        "read_gb_per_s": figures(size / step_s / 1e9),
        "bandwidth_gb_per_s": figures(bandwidth / 1e9),
        "of_bound": figures(size / step_s / bandwidth, 3),
        "steps": len(steps),
    }
    print(line(row), flush=True)
    return row


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-3.2-1b", "llama-3-8b"])
    parser.add_argument("--weights", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seconds", type=float, default=5, help="of decoding, for each model and format")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="a toy model; writes no record")
    args = parser.parse_args(argv)
    neighbours, rows = Neighbours(), list[dict[str, Cell]]()
    if args.tiny:
        for kind in args.weights:
            measure("tiny", TINY.replace(context=512), kind, 0.2, read_bandwidth("cpu", 1 << 24, 0.2))
        return
    for name in args.models:
        config = preset(name).replace(context=512)
        bandwidth = read_bandwidth("cpu", BUFFER_BYTES["cpu"], 2)
        rows += [measure(name, config, kind, args.seconds, bandwidth) for kind in args.weights]
        heads = [
            Headline(f"Decoding {row['model']} in {row['weights']} on a CPU, share of the read bandwidth",
                     float(row["of_bound"] or 0), "", "", None)
            for row in rows
        ]  # fmt: skip
        report("decode_cpu_bandwidth", rows, f"{__doc__}\n{neighbours}, this one included", headlines=heads,
               folder=args.out)  # fmt: skip


if __name__ == "__main__":
    main()
