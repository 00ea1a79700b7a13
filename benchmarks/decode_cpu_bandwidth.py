"""Decoding of large models on a CPU, one request at a time, as a share of the speed at which memory delivers weights.

    python benchmarks/decode_cpu_bandwidth.py                                     # 1B- and 8B-shaped models, all cores
    python benchmarks/decode_cpu_bandwidth.py --models llama-3.2-1b --weights int8 int4 --seconds 3
    python benchmarks/decode_cpu_bandwidth.py --tiny                              # a toy: a smoke test, no record

Weights are random (the time does not depend on them): a part of a matrix of each shape is drawn and quantised, and
copied for each layer, so that no two layers share memory. The bound of a step is (weights that it reads + keys and
values) / read bandwidth. Bandwidth is that of the fastest of torch's reductions of 2 GB (more than the caches) on the
same threads. It changes from second to second where other machines use the same memory, so it is measured before and
after the steps of each round; the share is the median of the rounds' shares of the mean of the two. That compares
median steps with the fastest reading; ``fastest_of_bound`` compares the fastest step of a round with the fastest
reading before or after it. ``peak_memory_mb`` is the most that the process has held so far. Steps are
those of the engine, greedy, with contexts of 16 to 256 tokens.
"""

import argparse
import gc
import resource
import statistics
from pathlib import Path

import torch
from torch import Tensor

from colonnade import api
from colonnade.bench.ceilings import read_bandwidth
from colonnade.bench.roofline import PROMPT_TOKENS, WeightKind, read_bytes, step_seconds
from colonnade.config import ModelConfig, ServeConfig
from colonnade.config.presets import preset
from colonnade.kernels.cpu.huge_pages import Arena, arena_bytes
from colonnade.kernels.linear.quantise import BLOCK, Kind, Quantised, can_block, quantise, to_blocks
from colonnade.model import KVCache, Transformer
from colonnade.model.weight_only_quant import build, kind_of
from colonnade.parallel.axis import Axes
from colonnade.parallel.distributed_context import DistributedContext
from decode_model import TINY
from harness.engine_load import word_tokenizer
from harness.paired_timing import OtherProcesses
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import format_row, round_significant

KINDS = ("bfloat16", "int8", "int4")
GROUP = 32
PAGE = 16
DRAWN = 1024
"""Outputs of a matrix that are drawn."""
BUFFER_BYTES = 1 << 31
BANDWIDTH_S = 0.5
CPU = torch.device("cpu")


def filled(weight: Tensor, block: Tensor) -> None:
    """Copy ``block`` into ``weight`` again and again."""
    flat = weight.view(-1)
    whole = len(flat) // len(block) * len(block)
    flat[:whole].view(-1, len(block)).copy_(block)
    flat[whole:].copy_(block[: len(flat) - whole])


def random_model(config: ModelConfig, kind: WeightKind) -> Transformer:
    """A model with random weights in ``kind``."""
    block = torch.empty(1 << 20, dtype=torch.bfloat16).normal_(std=0.02)
    if kind == "bfloat16":
        model = Transformer(config, Axes(), device=CPU, dtype=torch.bfloat16)
        with torch.no_grad():
            for weight in model.parameters():
                filled(weight, block)
        return model.eval().requires_grad_(False)
    model, store = build(config, Axes(), device=CPU, dtype=torch.bfloat16, kind=kind, group=GROUP)
    drawn: dict[str, Quantised] = {}
    parameters = dict(model.named_parameters())
    for name, weight in parameters.items():
        if weight.is_meta:
            known = (x for x in drawn.values() if (x.outputs, x.inputs, x.kind) == (*weight.shape, kind_of(name, kind)))
            drawn[name] = next(known, None) or random_quantised(
                weight.shape[0], weight.shape[1], kind_of(name, kind), block
            )
    arena = Arena(arena_bytes([x for each in drawn.values() for x in (each.values, each.scales)]))
    with torch.no_grad():
        for name, weight in parameters.items():
            if (each := drawn.get(name)) is None:
                filled(weight, block)
            else:
                store(name, weight, each._replace(values=arena.copy(each.values), scales=arena.copy(each.scales)))
    return model.eval().requires_grad_(False)


def random_quantised(outputs: int, inputs: int, kind: Kind, block: Tensor) -> Quantised:
    """A random matrix, in blocks if that is possible; the first outputs are repeated."""
    rows = torch.empty(min(outputs, DRAWN), inputs, dtype=torch.bfloat16)
    filled(rows, block)
    weight = quantise(rows, kind, GROUP)
    if not can_block(weight) or outputs % BLOCK:
        filled(rows := torch.empty(outputs, inputs, dtype=torch.bfloat16), block)
        return quantise(rows, kind, GROUP)
    weight = to_blocks(weight)
    values = torch.empty(outputs, *weight.values.shape[1:], dtype=weight.values.dtype)
    scales = torch.empty(outputs, *weight.scales.shape[1:], dtype=weight.scales.dtype)
    filled(values, weight.values.view(-1))
    filled(scales, weight.scales.view(-1))
    return weight._replace(values=values, scales=scales)


def measure(
    name: str, config: ModelConfig, kind: WeightKind, seconds: float, rounds: int, buffer_bytes: int
) -> dict[str, Cell]:
    """A row for one model and format."""
    gc.collect()  # the engine before, which holds its weights
    transformer = random_model(config, kind)
    model = api.Model(transformer, word_tokenizer(config.vocab_size), DistributedContext.solo(), name)
    pages = -(-(PROMPT_TOKENS + 240) // PAGE) + 1
    keys = KVCache.bytes_per_page(config, transformer.axes, 1, torch.bfloat16)
    bandwidths = [read_bandwidth("cpu", buffer_bytes, BANDWIDTH_S)]
    steps, rates, shares, fastest = list[float](), list[float](), list[float](), list[float]()
    for _ in range(rounds):
        own = step_seconds(model, ServeConfig(max_requests=1, page_tokens=PAGE, pages=pages), seconds / rounds)
        size = read_bytes(transformer, 1) + (PROMPT_TOKENS + len(own) / 2) * keys
        bandwidths.append(read_bandwidth("cpu", buffer_bytes, BANDWIDTH_S))
        steps += own
        rates.append(size / statistics.median(own))
        shares.append(rates[-1] / statistics.mean(bandwidths[-2:]))
        fastest.append(size / min(own) / max(bandwidths[-2:]))
    size = read_bytes(transformer, 1) + (PROMPT_TOKENS + len(steps) / rounds / 2) * keys
    bandwidth = statistics.median(bandwidths)
    row: dict[str, Cell] = {
        "model": name,
        "weights": kind,
        "threads": torch.get_num_threads(),
        "mb_per_token": round_significant(size / 1e6),
        "tokens_per_s": round_significant(1 / statistics.median(steps)),
        "bound_tokens_per_s": round_significant(bandwidth / size),
        "read_gb_per_s": round_significant(statistics.median(rates) / 1e9),
        "bandwidth_gb_per_s": round_significant(bandwidth / 1e9),
        "least_bandwidth_gb_per_s": round_significant(min(bandwidths) / 1e9),
        "most_bandwidth_gb_per_s": round_significant(max(bandwidths) / 1e9),
        "of_bound": round_significant(statistics.median(shares), 3),
        "least_of_bound": round_significant(min(shares), 3),
        "most_of_bound": round_significant(max(shares), 3),
        "fastest_of_bound": round_significant(statistics.median(fastest), 3),
        "steps": len(steps),
        "peak_memory_mb": round_significant(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }
    print(format_row(row), flush=True)
    return row


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-3.2-1b", "llama-3-8b"])
    parser.add_argument("--weights", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seconds", type=float, default=5, help="of decoding, for each model and format")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", default="decode_cpu_bandwidth", help="name of the record")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="a toy model; writes no record")
    args = parser.parse_args(argv)
    neighbours, rows = OtherProcesses(), list[dict[str, Cell]]()
    if args.tiny:
        for kind in args.weights:
            measure("tiny", TINY.replace(context=512), kind, 0.2, 1, 1 << 24)
        return
    for name in args.models:
        config = preset(name).replace(context=512)
        for kind in args.weights:
            rows.append(measure(name, config, kind, args.seconds, args.rounds, BUFFER_BYTES))
            heads = [
                Headline(f"Decoding {row['model']} in {row['weights']} on a CPU, share of the read bandwidth",
                         float(row["of_bound"] or 0), "", "", None)
                for row in rows
            ]  # fmt: skip
            notes = f"{__doc__}\nmedians of {args.rounds} rounds; {neighbours}, this one included"
            report(args.record, rows, notes, headlines=heads, folder=args.out)  # kept if it is stopped


if __name__ == "__main__":
    main()
