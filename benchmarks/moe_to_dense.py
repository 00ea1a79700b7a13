"""How much of a mixture's gain a dense model of equal arithmetic keeps (Switch, arXiv 2101.03961, section 4.2: 30%).

    python benchmarks/moe_to_dense.py           # on a CPU, two models at a time on a thread each: 14 minutes
    python benchmarks/moe_to_dense.py --tiny    # a few steps; writes no record

    kept = (dense − student) / (dense − mixture)        held-out cross-entropies, nats a token

The mixture has 16 experts of 32 hidden units, 2 a token; the dense models have feed-forward layers of 64, so that a
token takes the same arithmetic. Layers are narrow, so that hidden units are what the dense model lacks: with 8 experts
of 576 and 5 million tokens the mixture was no better than the dense model (docs/log.md), and there was nothing to keep.
All train on the State of the Union speeches (``--text``: a file of their text instead), less than once, with the same
steps, batches and learning rates, from the same seed, and are measured on the last windows of the text:

    dense                  from random weights, cross-entropy
    student                :func:`colonnade.tune.to_dense`, and the defaults of ``[distill]``: half cross-entropy, half
                           KL
    fitted, KL             the same start, KL alone
    fitted, CE             the same start, cross-entropy alone: what the initial weights give without a teacher
    random, half           the mixture's weights but random feed-forward layers; half cross-entropy, half KL
    Switch's method           the same start; .75 of cross-entropy, .25 of KL

The students see the tokens that the mixture has learned from a second time, so they have had more training than the
dense model. Each model is measured ``--measured`` times in training, and the least held-out value counts.
"""

import argparse
import math
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, multiprocessing

from colonnade.config import ModelConfig, MoeConfig
from colonnade.config.distill import DistillConfig
from colonnade.model import Loss, Rows, Transformer, initialise
from colonnade.model.distill_loss import Distillation, DistillLoss, TeacherStates
from colonnade.tune import to_dense
from colonnade.tune.to_dense import dense_config
from expert_compression import Text, inputs, read
from harness.report import Cell, Headline, folder_of, report
from harness.rows import format_row
from harness.torch_training import training_update

SWITCH_ROW = "Switch's method"
STUDENTS: dict[str, tuple[str, DistillLoss | None]] = {
    "student": ("fitted", DistillLoss(DistillConfig().loss, DistillConfig().mix)),
    "fitted, KL": ("fitted", DistillLoss("kl", mix=0)),
    "fitted, CE": ("fitted", None),
    "random, half": ("random", DistillLoss("kl", mix=0.5)),
    SWITCH_ROW: ("random", DistillLoss("kl", mix=0.75)),
}
"""Each student's feed-forward layers at the start, and its loss; None: cross-entropy."""
WINDOW, CALIBRATION, RATE = 128, 512, 4e-3
SHAPE = ModelConfig(
    family="mixtral", vocab_size=512, layers=2, width=48, heads=2, kv_heads=2, head_width=24, ffn_width=32,
    context=WINDOW, moe=MoeConfig(experts=16, active=2, ffn_width=32, balance_weight=0.01),
)  # fmt: skip
TINY = SHAPE.replace(vocab_size=300, moe=SHAPE.moe and SHAPE.moe.replace(experts=4))


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

    def best(self, model: Transformer, teacher: Transformer | None = None, how: DistillLoss | None = None) -> float:
        """The least held-out nats; ``model`` has the weights of then afterwards."""
        model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
        generator = torch.Generator().manual_seed(self.seed)
        least, weights = math.inf, dict[str, Tensor]()
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))
            windows = self.text.train[torch.randint(len(self.text.train), (self.batch,), generator=generator)]
            training_update(model, optimizer, self._loss(model, windows, teacher, how))
            if (step + 1) % self.every == 0 or step + 1 == self.steps:
                nats = held_out_nats(model, self.text)
                if nats < least:
                    least, weights = nats, {name: value.clone() for name, value in model.state_dict().items()}
                print(f"  seed {self.seed}, step {step + 1}: {nats:.4f}", flush=True)
        model.load_state_dict(weights)
        model.requires_grad_(False)
        return least

    def _loss(
        self, model: Transformer, windows: Tensor, teacher: Transformer | None, how: DistillLoss | None
    ) -> Tensor:
        targets = windows[:, 1:].flatten()
        # Losses of routers are sums over tokens, and this one is a mean.
        stream, attend = inputs(windows[:, :-1], weight=1 / len(targets))
        if teacher is None or how is None:
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
    new = initialise(Transformer(dense_config(mixture.config, moe.active)), seed)
    same = {name: value for name, value in mixture.state_dict().items() if ".ffn." not in name}
    assert set(same) <= set(new.state_dict()), "attention, norms and embeddings have the same names"
    new.load_state_dict(same, strict=False)
    return new


Trained = tuple[dict[str, Cell], dict[str, Tensor]]
"""A model's row and its weights."""


def trained(job: tuple[int, str, dict[str, Tensor]], args: argparse.Namespace) -> Trained:
    """Train one model of a seed; a student is given the mixture's weights."""
    (seed, what, weights), began = job, time.process_time()
    torch.set_num_threads(1)
    shape = TINY if args.tiny else SHAPE
    moe = shape.moe
    assert moe is not None
    text = read(args.text, shape.vocab_size, torch.device("cpu"), tiny=args.tiny, window=WINDOW)
    training = Training(text, seed, args.steps, args.batch, args.measured)
    mixture = initialise(Transformer(shape), seed)
    if what == "mixture":
        model, teaching = mixture, None
    elif what == "dense":
        model, teaching = initialise(Transformer(dense_config(shape, moe.active)), seed), None
    else:
        mixture.load_state_dict(weights)
        start, teaching = STUDENTS[what]
        texts = list(text.train[:: max(1, len(text.train) // CALIBRATION), :-1])
        model = to_dense(mixture, texts) if start == "fitted" else switch_start(mixture, seed)
    first = held_out_nats(model, text)
    nats = training.best(model, mixture.requires_grad_(False) if teaching else None, teaching)
    row: dict[str, Cell] = {
        "what": what, "seed": seed, "start_nats": round(first, 3), "nats": round(nats, 4),
        "cpu_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip
    print(format_row(row), flush=True)
    return row, model.state_dict()


def all_rows(args: argparse.Namespace) -> list[dict[str, Cell]]:
    """Mixtures and dense models of all seeds, then their students, ``--jobs`` at a time."""
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        train = partial(trained, args=args)
        bases = pool.map(train, [(seed, what, {}) for seed in args.seeds for what in ("mixture", "dense")], 1)
        known = {(row["what"], row["seed"]): (float(row["nats"] or 0), weights) for row, weights in bases}
        jobs = [(seed, what, known["mixture", seed][1]) for seed in args.seeds for what in STUDENTS]
        students = [row for row, _ in pool.map(train, jobs, 1)]
    for row in students:
        dense = known["dense", row["seed"]][0]
        gain = dense - known["mixture", row["seed"]][0]
        row["kept_percent"] = round(100 * (dense - float(row["nats"] or 0)) / (gain or math.inf), 1)
    return [row for row, _ in bases] + students


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--measured", type=int, default=6, help="times in training")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.tiny:
        args.steps, args.batch, args.seeds = 4, 2, args.seeds[:2]
    rows, shape = all_rows(args), TINY if args.tiny else SHAPE
    kept = {what: [float(row["kept_percent"] or 0) for row in rows if row["what"] == what] for what in STUDENTS}
    notes = (
        f"{shape.size}; {args.steps} steps of {args.batch} × {WINDOW} tokens for each model; "
        f"nats: the best of {args.measured} held-out measurements in training; kept_percent over "
        f"{len(args.seeds)} seeds: {'; '.join(f'{what} {spread(values)}' for what, values in kept.items())}"
    )
    head = Headline(
        "Share of the mixture's gain that a dense student keeps", round(statistics.mean(kept["student"]), 1), "%",
        "Switch's method, same run", round(statistics.mean(kept[SWITCH_ROW]), 1),
    )  # fmt: skip
    report("moe_to_dense", rows, notes=notes, headlines=[head], folder=folder_of(args.out, toy=args.tiny))


def spread(values: list[float]) -> str:
    """Mean, lowest and highest."""
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
