"""Quality and CPU decoding speed of SmolLM2-135M with quantised weights.

    python benchmarks/quantised_quality.py                  # 8,192 tokens; eight minutes on two cores
    python benchmarks/quantised_quality.py --windows 2      # fewer; with --out FOLDER to keep the published record

The text is the beginning of the latest ``sotu`` speech in windows of 512 tokens, evaluated in float32 on a CPU.
``kl_nats`` is the mean Kullback-Leibler divergence of the quantised model's predictions from the stored one's;
``same_first`` is the share of tokens at which both predict the same most likely token. ``bits`` are bits per weight of
a quantised matrix with its scales (SmolLM2's embedding, tied to its output, is not quantised). ``token_ms`` is the time
per token of one answer on one core, the minimum over several alternating rounds.

The stored matrices are themselves 4-bit (GGUF's Q4_1: a scale and a minimum for 32 neighbouring inputs), so int4 in the
same groups of 32 reproduces them almost exactly. Therefore a second, "shuffled" model is measured too: the inputs of
its matrices are permuted (residual width, hidden units, each head's width) so that it computes the same function. Its
groups of 32 mix weights of many blocks, as in a checkpoint that was never quantised. With one scale per row the order
does not matter: int8 and float8 are measured once.
"""

import argparse
import math
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

import colonnade
from colonnade.api import Model
from colonnade.config import WeightFormat, WeightGroup
from colonnade.data.readers import sotu_documents
from colonnade.kernels.linear.quantise import Kind, stored_bytes
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import quantisable_shapes
from harness.report import RESULTS, Cell, Headline, report

STORED, SHUFFLED = "as in the file", "shuffled"


def shuffled(model: Model) -> Model:
    """``model`` with the inputs of each matrix permuted; it computes the same function."""
    draw, shape, state = torch.Generator().manual_seed(0), model.config, model.transformer.state_dict()

    def order(n: int) -> Tensor:
        return torch.randperm(n, generator=draw)

    wide, kv, head = order(shape.width), shape.kv_heads, shape.head_width
    for name, weight in state.items():
        parts = name.split(".")
        if parts[-2] in ("tokens", "qkv", "gate", "up"):
            weight.copy_(weight[:, wide])
        elif parts[-2] in ("out", "down") or "norm" in parts[-2]:
            weight.copy_(weight[wide])
        else:
            raise ValueError(f"no rule to shuffle {name}")
    for i in range(shape.layers):
        of = f"blocks.{i}."
        units = order(shape.ffn_width)
        for name in ("gate", "up"):
            state[f"{of}ffn.{name}.weight"].copy_(state[f"{of}ffn.{name}.weight"][units])
        state[f"{of}ffn.down.weight"].copy_(state[f"{of}ffn.down.weight"][:, units])
        each = torch.stack([order(head) for _ in range(kv)])
        v_KHD = state[f"{of}attention.qkv.weight"].view(kv, shape.group + 2, head, -1)[:, -1]
        v_KHD.copy_(torch.stack([v_HD[by] for v_HD, by in zip(v_KHD, each, strict=True)]))
        out_DKgH = state[f"{of}attention.out.weight"].view(shape.width, kv, -1, head)
        out_DKgH.copy_(torch.stack([out_DKgH[:, k, :, by] for k, by in enumerate(each)], 1))
    return model


def bits(model: Model, weights: Kind, group: int) -> float:
    """Bits per weight of the matrices in the blocks."""
    shapes = quantisable_shapes(Transformer(model.config, device="meta", dtype=torch.float32)).values()
    stored = sum(n * stored_bytes(F, D, weights, group) for n, F, D in shapes)
    return 8 * stored / sum(n * F * D for n, F, D in shapes)


@torch.no_grad()
def compare(stored: Model, others: list[tuple[Model, dict[str, Cell]]], windows: Tensor) -> list[dict[str, Cell]]:
    """Rows of ``stored`` and ``others`` over windows (W, T + 1); each predicted token counts once."""
    count = windows[:, 1:].numel()
    nll, kl, same = (torch.zeros(1 + len(others), dtype=torch.float64) for _ in range(3))
    for number, tokens in enumerate(windows):
        inputs, targets_T1 = tokens[:-1], tokens[1:, None]
        stored_TV = stored.logits(inputs).log_softmax(1)
        for i, model in enumerate([stored, *(model for model, _ in others)]):
            model_TV = model.logits(inputs).log_softmax(1) if i else stored_TV
            nll[i] -= model_TV.gather(1, targets_T1).double().sum()
            kl[i] += (stored_TV.exp() * (stored_TV - model_TV)).sum(dtype=torch.float64)
            same[i] += (model_TV.argmax(1) == stored_TV.argmax(1)).sum()
        print(f"window {number + 1} of {len(windows)}", flush=True)
    names = [{"weights": "stored", "group": None, "order": STORED, "bits": 32.0}, *(name for _, name in others)]
    return [
        {
            **name, "tokens": count, "perplexity": round(math.exp(nll[i] / count), 3),
            "kl_nats": round(float(kl[i]) / count, 5), "same_first": round(float(same[i]) / count, 4),
        }
        for i, name in enumerate(names)
    ]  # fmt: skip


def token_ms(models: list[Model], rounds: int = 5, count: int = 12) -> list[float]:
    """Milliseconds per token of each model: a long answer minus a short one, so that the prompt does not count."""
    threads, taken = torch.get_num_threads(), [[math.inf, math.inf] for _ in models]
    torch.set_num_threads(1)
    for _ in range(rounds):
        for model, least in zip(models, taken, strict=True):
            for i, tokens in enumerate((1, 1 + count)):
                began = time.perf_counter()
                model.generate([1, 2, 3, 4], temperature=0, max_tokens=tokens, ignore_eos=True)
                least[i] = min(least[i], time.perf_counter() - began)
    torch.set_num_threads(threads)
    return [round(1e3 * (long - short) / count, 2) for short, long in taken]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=512, help="tokens per window")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    stored = colonnade.load("smollm2", dtype="float32", device="cpu")
    name, text = sotu_documents()[-1]
    tokens = torch.tensor(stored.tokenizer.encode(text)[: args.windows * args.context + 1])
    windows = tokens.unfold(0, args.context + 1, args.context)
    others = list[tuple[Model, dict[str, Cell]]]()

    def add(path: str, weights: WeightFormat, group: WeightGroup, order: str) -> None:
        model = colonnade.load(path, dtype="float32", device="cpu", weights=weights, weight_group=group)
        each = 32.0 if weights == "stored" else round(bits(stored, weights, group), 3)
        shown_group = group if weights == "int4" else None
        others.append((model, {"weights": weights, "group": shown_group, "order": order, "bits": each}))

    add("smollm2", "int8", 64, STORED)
    add("smollm2", "float8", 64, STORED)
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "smollm2"
        colonnade.save(shuffled(colonnade.load("smollm2", dtype="float32", device="cpu")), exported, format="hf")
        add(str(exported), "stored", 64, SHUFFLED)
        for path, order in (("smollm2", STORED), (str(exported), SHUFFLED)):
            for group in (32, 64, 128):
                add(path, "int4", group, order)
    rows = compare(stored, others, windows)
    timed = [(stored, rows[0])] + [(model, row) for (model, _), row in zip(others, rows[1:], strict=True)]
    timed = [(model, row) for model, row in timed if row["order"] == STORED]
    for (_, row), took in zip(timed, token_ms([model for model, _ in timed]), strict=True):
        row["token_ms"] = took
    for row in rows:
        what = f"{row['weights']} {row['group'] or ''}".strip()
        print(
            f"{what:10} {row['order']:15} {row['bits']:6.3f} bits  perplexity {row['perplexity']:7.3f}  "
            f"KL {row['kl_nats']:.5f}  same {row['same_first']:.2%}  {row.get('token_ms', '')}"
        )
    row = next(row for row in rows if (row["group"], row["order"]) == (64, SHUFFLED))
    what = f"perplexity of SmolLM2-135M, {row['tokens']:,} tokens of {name}, inputs shuffled, in int4, groups of 64"
    values = [float(each["perplexity"] or 0) for each in (row, rows[0])]
    head = Headline(what, values[0], "(lower is better)", "stored", values[1])
    report("quantised_quality_cpu", rows, __doc__ or "", headlines=[head], folder=args.out)


if __name__ == "__main__":
    main()
