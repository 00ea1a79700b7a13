"""What is left of a mixture of experts at equal bytes: pruned, merged, quantised, ternary, dense.

    python benchmarks/expert_compression.py             # trains a mixture on a GPU: 3 minutes
    python benchmarks/expert_compression.py --tiny      # on a CPU, a few steps; writes no record

A mixture with the layers of Mixtral is trained on the State of the Union speeches (``--text``: a file of their text
instead) and compressed with the experts' part of :mod:`colonnade.tune` and :mod:`colonnade.compress`; calibration reads
the training part. ``expert_bytes`` counts experts that are not quantised with two bytes per weight. ``perplexity`` and
``kl_nats`` (from the mixture's predictions) are over the last twentieth of the text, in windows of 512 tokens.
Recovered models train for 252 steps of a calibration text each: ternary experts train trits and scales, int4 trains the
scales of all other layers. int4 also quantises what is no expert, ternary does not. The question that the table
answers: whether ternary experts beat int4 experts pruned to the same bytes.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.compress import Compression, compress
from colonnade.compress.recover import recover
from colonnade.config import ModelConfig, MoeConfig
from colonnade.data.readers import sotu_documents
from colonnade.data.tokenizer import Tokenizer
from colonnade.model import Loss, Packed, Rows, Stream, Transformer, initialise
from colonnade.model.moe import Routing
from colonnade.model.weight_only_quant import quantised_parameters
from colonnade.tune import merge_experts, prune, score_experts, to_dense
from harness.report import Cell, Headline, folder_of, report
from harness.rows import format_row
from harness.torch_training import training_update

WINDOW, CALIBRATION, RECOVERY = 512, 64, 252
SHAPE = ModelConfig(
    family="mixtral", vocab_size=4096, layers=3, width=288, heads=6, kv_heads=2, head_width=48, ffn_width=576,
    context=WINDOW, moe=MoeConfig(experts=32, active=2, ffn_width=576, balance_weight=0.01),
)  # fmt: skip
TINY = SHAPE.replace(
    vocab_size=300, layers=2, width=36, heads=2, kv_heads=1, head_width=18, ffn_width=72,
    moe=SHAPE.moe and SHAPE.moe.replace(experts=8, ffn_width=72),
)  # fmt: skip


@dataclass
class Text:
    """Tokens in windows (W, 513), or of another length, to train on, and to measure on."""

    train: Tensor
    held_out: Tensor


def read(path: Path | None, vocab_size: int, device: torch.device, *, tiny: bool, window: int = WINDOW) -> Text:
    documents = [text for _, text in sotu_documents()] if path is None else [path.read_text("utf-8")]
    if tiny:
        documents = [document[:20_000] for document in documents[-3:]]
    tokenizer = Tokenizer.train(documents, vocab_size)
    ids = torch.tensor([token for document in documents for token in tokenizer.encode(document)], device=device)
    windows = ids[: len(ids) // (window + 1) * (window + 1)].view(-1, window + 1)
    held_out = max(1, min(64, len(windows) // 20))
    return Text(windows[:-held_out], windows[-held_out:])


def inputs(windows: Tensor, *, weight: float | None = None) -> tuple[Stream, Packed]:
    B, T = windows.shape
    index_T = torch.arange(B * T, device=windows.device)
    stream = Stream(windows.flatten(), index_T % T, routing=Routing(index_T, weight))
    return stream, Packed.of([T] * B, windows.device)


def train(model: Transformer, text: Text, steps: int, batch: int, teacher: Transformer | None = None) -> None:
    """AdamW with a cosine; with a ``teacher``, half of the loss is the divergence from it."""
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    began = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        windows = text.train[torch.randint(len(text.train), (batch,), generator=generator)]
        # Losses of routers are sums over tokens, and this one is a mean.
        stream, attend = inputs(windows[:, :-1], weight=1 / windows[:, 1:].numel())
        if teacher is None:
            total, count = model(stream, attend, Loss(windows[:, 1:].flatten()))
            loss = total / count
        else:
            logits_TV = model(stream, attend, Rows())
            with torch.no_grad():
                target_TV = teacher(*inputs(windows[:, :-1]), Rows()).log_softmax(1)
            kl = F.kl_div(logits_TV.log_softmax(1), target_TV, reduction="batchmean", log_target=True)
            loss = 0.5 * F.cross_entropy(logits_TV, windows[:, 1:].flatten()) + 0.5 * kl
        training_update(model, optimizer, loss)
        if step % 250 == 0 or step + 1 == steps:
            print(f"step {step}: {loss.item():.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    model.requires_grad_(False)


@torch.no_grad()
def quality(model: Transformer, whole: Transformer, text: Text) -> tuple[float, float]:
    """(perplexity, KL from the whole mixture)."""
    nll = kl = 0.0
    for window in text.held_out:
        stream, attend = inputs(window[None, :-1])
        logp, logq = (m(stream, attend, Rows()).float().log_softmax(1) for m in (whole, model))
        nll -= float(logq.gather(1, window[1:, None]).double().sum())
        kl += float((logp.exp() * (logp - logq)).sum(dtype=torch.float64))
    tokens = text.held_out[:, 1:].numel()
    return math.exp(nll / tokens), kl / tokens


def expert_bytes(model: Transformer) -> int:
    """Of routed experts, or of the feed-forward layers of a dense model."""
    found = {n: w.nbytes for n, w in quantised_parameters(model).items() if ".ffn.experts." in n}
    plain = {n: 2 * p.numel() for n, p in model.named_parameters() if ".ffn." in n and ".router." not in n}
    return sum(found.values()) + sum(size for n, size in plain.items() if n not in found)


def copied(model: Transformer) -> Transformer:
    device = next(model.parameters()).device
    new = Transformer(model.config, device=device)
    new.load_state_dict(model.state_dict())
    return new.requires_grad_(False)


def ways(
    whole: Transformer, text: Text, distil: Callable[[Transformer], None], recovery: int
) -> dict[str, Callable[[], Transformer]]:
    """What is compared, by name."""
    moe, texts = whole.config.moe, list(text.train[:: max(1, len(text.train) // CALIBRATION), :-1])
    assert moe is not None
    scores = score_experts(whole, texts)

    def kept(count: int, by: str = "reap") -> Transformer:
        return prune(whole, scores.reap_LE if by == "reap" else scores.load_LE, count).requires_grad_(False)

    def quantised(model: Transformer, how: Compression) -> Transformer:
        compress(model, how.replace(min_tokens=1), texts)
        return model

    def recovered(model: Transformer) -> Transformer:
        recover(model, whole, texts, recovery)
        return model

    def dense(trained: bool) -> Transformer:
        model = to_dense(whole, texts)
        if trained:
            distil(model)
        return model

    E, quarter = moe.experts, moe.experts // 4
    int4 = Compression(weights="int4", weight_group=32, fold=False)
    # Experts in int4 (5 bits per weight with their scales) that take no fewer bytes than all of them in 0.889 bits.
    few = max(moe.active, math.ceil(E * (16 / 18) / 5))
    found: dict[str, Callable[[], Transformer]] = {
        "all experts": lambda: whole,
        f"int4 g32 gptq, keep {few} by reap": lambda: quantised(kept(few), int4),
        "ternary 0.889 bits": lambda: quantised(copied(whole), Compression(weights="ternary")),
        f"int4 g32 gptq, keep {few} by reap, recovered": lambda: recovered(quantised(kept(few), int4)),
        "ternary 0.889 bits, recovered": lambda: recovered(quantised(copied(whole), Compression(weights="ternary"))),
        f"keep {moe.active}, reap": lambda: kept(moe.active),
        f"keep {quarter}, reap": lambda: kept(quarter),
        f"keep {quarter}, load": lambda: kept(quarter, "load"),
        "dense, untrained": lambda: dense(False),
        "dense, distilled": lambda: dense(True),
        "int4 g32 gptq": lambda: quantised(copied(whole), int4),
        f"merge {quarter}": lambda: merge_experts(whole, texts, quarter).requires_grad_(False),
        f"int4 g32 gptq, merge {few}": lambda: quantised(merge_experts(whole, texts, few), int4),
        "ternary 0.889 bits, nearest": lambda: quantised(copied(whole), Compression(weights="ternary", by="nearest")),
    }
    for word, bits in ((24, 0.667), (32, 0.5)):
        how = Compression(weights="ternary", word=word)
        found[f"ternary {bits} bits"] = lambda how=how: quantised(copied(whole), how)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    steps, batch = (20, 2) if args.tiny else (args.steps, args.batch)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    config, out = TINY if args.tiny else SHAPE, folder_of(args.out, toy=args.tiny)
    text = read(args.text, config.vocab_size, device, tiny=args.tiny)
    whole = initialise(Transformer(config, device=device), 0)
    train(whole, text, steps, batch)
    notes = (
        f"{config.size}, {config.moe and config.moe.experts} experts; {text.train.numel():,} tokens of training text, "
        f"{steps} steps of {batch} × {WINDOW}; the dense model is distilled for {steps // 4} steps; held out: "
        f"{text.held_out[:, 1:].numel():,} tokens"
    )
    rows: list[dict[str, Cell]] = []
    for what, make in ways(
        whole, text, lambda model: train(model, text, steps // 4, batch, whole), 2 if args.tiny else RECOVERY
    ).items():
        began = time.perf_counter()
        model = make()
        perplexity, kl = quality(model, whole, text)
        rows.append(
            {
                "what": what, "expert_bytes": expert_bytes(model), "perplexity": round(perplexity, 3),
                "kl_nats": round(kl, 4), "seconds": round(time.perf_counter() - began, 1),
            }
        )  # fmt: skip
        print(format_row(rows[-1]), flush=True)
        by = {str(row["what"]): float(row["perplexity"] or 0) for row in rows}
        pruned = next((name for name in by if name.startswith("int4") and "keep" in name), None)
        heads = []
        if pruned and "ternary 0.889 bits" in by:
            title = "Perplexity of ternary experts (0.889 bits), toy mixture"
            heads = [
                Headline(title, by["ternary 0.889 bits"], "(lower is better)", f"{pruned}, equal bytes", by[pruned])
            ]
        report("expert_compression", rows, notes=notes, headlines=heads, folder=out)


if __name__ == "__main__":
    main()
