"""The quality ladder of post-training quantisation: SmolLM2-135M's perplexity, KL and bytes in each format.

    python benchmarks/compress.py --tokens 8192 --windows 8     # two cores, about 25 minutes
    python benchmarks/compress.py --tiny                        # a random model of two layers

The model is "shuffled" (benchmarks/quantised_quality.py): its file is 4-bit in groups of 32 neighbouring inputs, which
would flatter int4. Calibration reads the ``sotu`` speeches but the latest, and the measure is the beginning of the
latest in windows of 512 tokens, evaluated in float32 on a CPU. ``kl_nats`` is the mean Kullback-Leibler divergence from
the stored model's predictions. ``weight_bytes`` counts all weights, quantised or not. Peers quantise the same weights:
torchao where it is installed, and transformers reading the compressed-tensors files that we write.

Each row is appended to compress_rows.jsonl as soon as it is measured; a second run goes on after those that are there.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import colonnade
from colonnade.api import Model
from colonnade.compress import Compression, compress
from colonnade.compress.texts import calibration_texts
from colonnade.config import ModelConfig
from colonnade.data.readers import sotu_documents
from colonnade.model import Transformer, initialise
from colonnade.model.weight_only_quant import weight_bytes
from colonnade.parallel.distributed_context import DistributedContext
from harness.report import Cell, Headline, folder_of, report
from quantised_quality import shuffled

LADDER: dict[str, Compression] = {
    "int4 g64 nearest": Compression(by="nearest"),
    "int4 g64 gptq": Compression(fold=False),
    "int4 g64 folded gptq": Compression(),
    "int8": Compression(weights="int8"),
    "int8_dynamic": Compression(weights="int8_dynamic"),
    "float8": Compression(weights="float8"),
    "int4 g64 folded gptq, symmetric": Compression(grid="symmetric"),
    "int4 g64 folded gptq, zero points": Compression(grid="zero"),
    "int4 g32 folded gptq": Compression(weight_group=32),
    "int8_dynamic, not folded": Compression(weights="int8_dynamic", fold=False),
}
TINY = ModelConfig(vocab_size=300, layers=2, width=64, heads=4, kv_heads=2, ffn_width=128, context=128)


@torch.no_grad()
def measure(logits_of: Callable[[Tensor], Tensor], stored_WTV: list[Tensor], windows: Tensor) -> dict[str, Cell]:
    """Perplexity, and KL from the stored model's log-probabilities, over windows (W, T + 1)."""
    nll = kl = 0.0
    for tokens, stored_TV in zip(windows, stored_WTV, strict=True):
        model_TV = logits_of(tokens[:-1]).float().log_softmax(1)
        nll -= float(model_TV.gather(1, tokens[1:, None]).double().sum())
        kl += float((stored_TV.exp() * (stored_TV - model_TV)).sum(dtype=torch.float64))
    count = windows[:, 1:].numel()
    return {"perplexity": round(math.exp(nll / count), 3), "kl_nats": round(kl / count, 5), "tokens": count}


def transformers_logits(model: Model) -> Callable[[Tensor], Tensor] | None:
    """transformers' logits of a model that is saved for it; None where compressed-tensors is not installed."""
    try:
        import compressed_tensors  # noqa: F401
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        colonnade.save(model, Path(folder) / "m", format="hf")
        peer = AutoModelForCausalLM.from_pretrained(Path(folder) / "m", dtype=torch.float32).eval()
    return lambda tokens: peer(tokens[None]).logits[0]


def torchao_logits(model: Model, bits: int) -> Callable[[Tensor], Tensor] | None:
    """Logits of transformers' model with its linear layers quantised by torchao; None where that is not installed."""
    try:
        from torchao.quantization import (  # type: ignore[import-not-found]
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            quantize_,
        )
        from torchao.quantization.granularity import PerGroup  # type: ignore[import-not-found]
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        colonnade.save(model, Path(folder) / "m", format="hf")
        peer = AutoModelForCausalLM.from_pretrained(Path(folder) / "m", dtype=torch.float32).eval()
    config = IntxWeightOnlyConfig(torch.int4, PerGroup(64)) if bits == 4 else Int8WeightOnlyConfig()
    quantize_(peer.model.layers, config)
    return lambda tokens: peer(tokens[None]).logits[0]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072, help="calibration tokens")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    folder, context = folder_of(args.out, toy=args.tiny), 64 if args.tiny else 512
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "compress_rows.jsonl"

    def fresh() -> Model:
        if args.tiny:
            solo = DistributedContext.solo(torch.device("cpu"))
            return Model(initialise(Transformer(TINY), 0).requires_grad_(False), None, solo, "tiny")
        return shuffled(colonnade.load("smollm2", dtype="float32", device="cpu"))

    stored = fresh()
    if args.tiny:
        draw = torch.Generator().manual_seed(1)
        texts = [torch.randint(TINY.vocab_size, (128,), generator=draw) for _ in range(3)]
        tokens = torch.randint(TINY.vocab_size, (2 * context + 1,), generator=draw)
    else:
        texts = calibration_texts("sotu", stored.tokenizer, args.tokens)
        tokens = torch.tensor(stored.tokenizer.encode(sotu_documents()[-1][1])[: args.windows * context + 1])
    windows = tokens.unfold(0, context + 1, context)
    with torch.no_grad():
        stored_WTV = [stored.logits(each[:-1]).log_softmax(1) for each in windows]
    settings: dict[str, Cell] = {"calibration_tokens": sum(map(len, texts)), "windows": len(windows)}
    lines = kept.read_text("utf-8").splitlines() if kept.exists() else []
    rows: list[dict[str, Cell]] = [row for row in map(json.loads, lines) if settings.items() <= row.items()]
    done = {row["what"] for row in rows}

    def add(what: str, run: Callable[[], tuple[Callable[[Tensor], Tensor], int | None] | None]) -> None:
        if what in done or (found := run()) is None:
            return
        logits_of, size = found
        row = {"what": what, **settings, "weight_bytes": size, **measure(logits_of, stored_WTV, windows)}
        rows.append(row)
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    add("stored, float32", lambda: (stored.logits, weight_bytes(stored.transformer)))
    for what, compression in LADDER.items():

        def ours(compression: Compression = compression) -> tuple[Callable[[Tensor], Tensor], int]:
            model = fresh()
            compress(model.transformer, compression, texts)
            return model.logits, weight_bytes(model.transformer)

        add(what, ours)

    def peer() -> tuple[Callable[[Tensor], Tensor], None] | None:
        model = fresh()
        compress(model.transformer, Compression(by="nearest", grid="symmetric"))
        logits_of = transformers_logits(model)
        return None if logits_of is None else (logits_of, None)

    add("transformers, our int4 g64 nearest, symmetric", peer)
    for bits in (8, 4):

        def torchao(bits: int = bits) -> tuple[Callable[[Tensor], Tensor], None] | None:
            logits_of = torchao_logits(fresh(), bits)
            return None if logits_of is None else (logits_of, None)

        add(f"torchao, int{bits}" + (" g64" if bits == 4 else ""), torchao)
    by_name = {str(row["what"]): row for row in rows}
    best, dense = (float(by_name[each]["perplexity"] or 0) for each in ("int4 g64 folded gptq", "stored, float32"))
    head = Headline("SmolLM2-135M in int4, groups of 64, GPTQ", best, "perplexity (lower is better)", "stored", dense)
    name = "compress_tiny" if args.tiny else "compress_cpu"
    report(name, rows, __doc__ or "", headlines=[head], folder=folder)


if __name__ == "__main__":
    main()
