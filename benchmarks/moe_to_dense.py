"""How much of a mixture's gain a dense model of equal arithmetic keeps (Switch, arXiv 2101.03961, section 4.2: 30%).

    python benchmarks/moe_to_dense.py --seeds 0 1 2     # on a GPU, the seeds side by side: 2 minutes
    python benchmarks/moe_to_dense.py --tiny            # on a CPU, a few steps; writes no record

    kept = (dense − student) / (dense − mixture)        held-out cross-entropies, nats a token

The mixture has 8 experts, 2 a token; the dense models have feed-forward layers as wide as 2 experts, so that a token
takes the same arithmetic. All train on the State of the Union speeches (``--text``: a file of their text instead) with
the same steps, batches and learning rates, from the same seed, and are measured on the last twentieth of the text:

    dense               from random weights, cross-entropy
    student             :func:`colonnade.tune.to_dense`, then the defaults of ``[distill]``: half cross-entropy, half KL
    Switch's way        the mixture's weights but random feed-forward layers; .75 of cross-entropy, .25 of KL
    side by side, CE    to_dense, then cross-entropy alone: what the initial weights give without a teacher

Each is measured ``--measured`` times in training, and the best held-out value counts, for the mixture too: a small text
is learned by heart at different times. The teacher is the mixture at its best.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, multiprocessing

from colonnade.config import ModelConfig
from colonnade.config.distill import DistillConfig
from colonnade.model import Loss, Rows, Transformer, initialise
from colonnade.model.distill_loss import Distillation, DistillLoss, TeacherStates
from colonnade.tune import score_experts, to_dense
from colonnade.tune.to_dense import dense_config
from expert_compression import CALIBRATION, SHAPE, TINY, WINDOW, Text, copied, inputs, read
from harness.report import Cell, Headline, folder_of, report
from harness.rows import line
from harness.torch_training import update

DEFAULTS = DistillLoss(DistillConfig().loss, DistillConfig().mix)
SWITCH = DistillLoss("kl", mix=0.75)
SWITCH_ROW = "Switch's way"
EXPERTS = 8


def config(*, tiny: bool) -> ModelConfig:
    shape = TINY if tiny else SHAPE
    return shape.replace(moe=shape.moe and shape.moe.replace(experts=EXPERTS))


@torch.no_grad()
def held_out_nats(model: Transformer, text: Text) -> float:
    nll = 0.0
    for window in text.held_out:
        logits_TV = model(*inputs(window[None, :-1]), Rows()).float()
        nll -= float(logits_TV.log_softmax(1).gather(1, window[1:, None]).double().sum())
    return nll / text.held_out[:, 1:].numel()


class Training:
    """The steps that all models train for, with AdamW and a cosine; batches depend on the seed and the step alone."""

    def __init__(self, text: Text, seed: int, steps: int, batch: int, measured: int):
        self.text, self.seed, self.steps, self.batch = text, seed, steps, batch
        self.every = max(1, steps // measured)

    def best(self, model: Transformer, teacher: Transformer | None = None, how: DistillLoss = DEFAULTS) -> float:
        """The least held-out nats; ``model`` has the weights of then afterwards."""
        model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        generator = torch.Generator().manual_seed(self.seed)
        least, weights = math.inf, dict[str, Tensor]()
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))
            windows = self.text.train[torch.randint(len(self.text.train), (self.batch,), generator=generator)]
            update(model, optimizer, self._loss(model, windows, teacher, how))
            if (step + 1) % self.every == 0 or step + 1 == self.steps:
                nats = held_out_nats(model, self.text)
                if nats < least:
                    least, weights = nats, {name: value.clone() for name, value in model.state_dict().items()}
                print(f"  seed {self.seed}, step {step + 1}: {nats:.4f}", flush=True)
        model.load_state_dict(weights)
        model.requires_grad_(False)
        return least

    def _loss(self, model: Transformer, windows: Tensor, teacher: Transformer | None, how: DistillLoss) -> Tensor:
        targets = windows[:, 1:].flatten()
        # Losses of routers are sums over tokens, and this one is a mean.
        stream, attend = inputs(windows[:, :-1], weight=1 / len(targets))
        if teacher is None:
            total, count = model(stream, attend, Loss(targets))
        else:
            with torch.no_grad():
                states = teacher(*inputs(windows[:, :-1]), TeacherStates())
            total, count = model(stream, attend, Distillation(targets, states, how))
        return total / count


def switch_start(mixture: Transformer, seed: int) -> Transformer:
    """The mixture's weights but random feed-forward layers."""
    moe = mixture.config.moe
    assert moe is not None
    device = next(mixture.parameters()).device
    new = initialise(Transformer(dense_config(mixture.config, moe.active), device=device), seed)
    same = {name: value for name, value in mixture.state_dict().items() if ".ffn." not in name}
    assert set(same) <= set(new.state_dict()), "attention, norms and embeddings have the same names"
    new.load_state_dict(same, strict=False)
    return new


def rows_of(seed: int, args: argparse.Namespace, device: str) -> list[dict[str, Cell]]:
    torch.set_num_threads(1 if device == "cuda" else torch.get_num_threads())
    torch.backends.cuda.matmul.allow_tf32 = True
    shape = config(tiny=args.tiny)
    text = read(args.text, shape.vocab_size, torch.device(device), tiny=args.tiny)
    training = Training(text, seed, args.steps, args.batch, args.measured)
    mixture = initialise(Transformer(shape, device=device), seed)
    rows: list[dict[str, Cell]] = []
    nats: dict[str, float] = {}

    def add(what: str, make: Callable[[], Transformer], *teaching: Transformer | DistillLoss) -> None:
        began = time.perf_counter()
        model = make()
        start = held_out_nats(model, text)
        nats[what] = training.best(model, *teaching)  # type: ignore[arg-type] - a teacher and its loss, or neither
        gain = nats["dense"] - nats["mixture"] if "dense" in nats else math.nan
        kept = (nats["dense"] - nats[what]) / gain if teaching or what.endswith("CE") else None
        rows.append(
            {
                "what": what, "seed": seed, "start_nats": round(start, 3), "nats": round(nats[what], 4),
                "kept_percent": None if kept is None else round(100 * kept, 1),
                "train_tokens": text.train[:, 1:].numel(),
                "seconds": round(time.perf_counter() - began, 1),
            }
        )  # fmt: skip
        print(line(rows[-1]), flush=True)

    add("mixture", lambda: mixture)
    moe = shape.moe
    assert moe is not None
    texts = list(text.train[:: max(1, len(text.train) // CALIBRATION), :-1])
    beside = to_dense(mixture, score_experts(mixture, texts))
    add("dense", lambda: initialise(Transformer(dense_config(shape, moe.active), device=device), seed))
    add("student", lambda: copied(beside), mixture, DEFAULTS)
    add(SWITCH_ROW, lambda: switch_start(mixture, seed), mixture, SWITCH)
    if args.alone:
        add("side by side, CE", lambda: copied(beside))
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--measured", type=int, default=5, help="times in training")
    parser.add_argument(
        "--alone", action=argparse.BooleanOptionalAction, default=True, help="the row without a teacher"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.tiny:
        args.steps, args.batch, args.seeds = 4, 2, args.seeds[:2]
    device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    if device == "cuda" and len(args.seeds) > 1:  # steps of these sizes wait for the host
        with multiprocessing.get_context("spawn").Pool(len(args.seeds)) as pool:
            found = pool.starmap(rows_of, [(seed, args, device) for seed in args.seeds])
    else:
        found = [rows_of(seed, args, device) for seed in args.seeds]
    rows = [row for each in found for row in each]
    shape = config(tiny=args.tiny)
    kept = {
        what: [float(row["kept_percent"] or 0) for row in rows if row["what"] == what]
        for what in ("student", SWITCH_ROW)
    }
    notes = (
        f"{shape.size}, {EXPERTS} experts; {args.steps} steps of {args.batch} × {WINDOW} tokens for each model; "
        f"nats: the best of {args.measured} held-out measurements in training; kept_percent over "
        f"{len(args.seeds)} seeds: student {spread(kept['student'])}, Switch's way {spread(kept[SWITCH_ROW])}"
    )
    head = Headline(
        "Share of the mixture's gain that a dense student keeps", round(statistics.mean(kept["student"]), 1), "%",
        "Switch's way, same run", round(statistics.mean(kept[SWITCH_ROW]), 1),
    )  # fmt: skip
    report("moe_to_dense", rows, notes=notes, headlines=[head], folder=folder_of(args.out, toy=args.tiny))


def spread(values: list[float]) -> str:
    """Mean, lowest and highest."""
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
