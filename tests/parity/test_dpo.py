"""Preference losses equal plain torch under any plan, start at ln 2, and resume bit for bit."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.cli import main
from colonnade.config import LoraConfig, MoeConfig, Plan, RunConfig, TuneConfig
from colonnade.errors import ConfigError, DataError
from colonnade.model import IGNORE
from colonnade.model.preference_loss import SequenceLogprobs, logp_with_gradient
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.data_feed import MakeFeed
from colonnade.train.loop import Trainer
from colonnade.train.training_state import TrainingState
from colonnade.tune import preferences
from colonnade.tune.chats import Conversations
from colonnade.tune.preferences import preference_feed
from colonnade.tune.tuner import Tuner, tuned_run
from tests import tuning
from tests.models import build, ragged
from tests.parity.test_sft import conversations
from tests.worlds import assert_same
from tests.worlds import run as in_world

KINDS = {
    "dpo": TuneConfig(beta=0.3),
    "conservative": TuneConfig(beta=0.3, flipped=0.2),
    "ipo": TuneConfig(beta=0.3, loss="ipo"),
}
NONE = Conversations([])


def pairs(count: int = 10) -> Conversations:
    return conversations(2 * count)


def _logprobs() -> list[Tensor]:
    """Log-probabilities weighted at random, and their gradients by x, W and the rest of the model."""
    results = []
    for plan in (Plan(tp=2), Plan(tp=2, sequence_parallel=True)):
        with DistributedContext.build(plan) as context:
            model = build(tuning.MODEL, context.axes)
            stream, attend, targets_T = ragged(tuning.MODEL)
            rows_R = torch.tensor([0, 3, 3, 20, 24])
            weight_R = torch.tensor([1.0, -2.0, 0.0, 0.5, 3.0], dtype=torch.float64)

            def head(x_tD, T, output, rows_R=rows_R, targets_T=targets_T):
                return logp_with_gradient(x_tD, T, rows_R, targets_T[rows_R], output)

            logp_R = model(stream, attend, head)
            (logp_R * weight_R).sum().backward()
            grads = [model.unembed.weight.grad, model.blocks[0].attention.qkv.weight.grad]
            results += [logp_R.detach(), *(context.axes.tp.join(g, 0, 2 * len(g)) for g in grads[1:])]
            results.append(context.axes.tp.join(grads[0], 0, 301))
    return results


def test_log_probabilities_equal_a_log_softmax() -> None:
    model = build(tuning.MODEL)
    stream, attend, targets_T = ragged(tuning.MODEL)
    rows_R = torch.tensor([0, 3, 3, 20, 24])
    weight_R = torch.tensor([1.0, -2.0, 0.0, 0.5, 3.0], dtype=torch.float64)
    from colonnade.model import Rows

    targets_R = targets_T[rows_R]
    logp_RV = model(stream, attend, Rows(rows_R)).log_softmax(1)
    logp_R = torch.where(targets_R != IGNORE, logp_RV.gather(1, targets_R.clamp(min=0)[:, None])[:, 0], 0.0)
    (logp_R * weight_R).sum().backward()
    reference = [logp_R.detach(), model.blocks[0].attention.qkv.weight.grad, model.unembed.weight.grad]
    for got in in_world(2, _logprobs):
        for i, x in enumerate(got):
            assert_same(x, reference[i % 3], what=str(i))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_equal_plain_torch(kind: str, tmp_path: Path) -> None:
    """At the first step, where the loss is ln 2 (ipo: 1 / 4β²), and at the second."""
    tune, data = KINDS[kind], pairs()
    run = tuning.settings(tmp_path, tuning.start(tmp_path), micro_batch=3)
    base = build(tuning.MODEL)
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=preference_feed(data, NONE, tune)) as training,
    ):
        first = training.step()
        model = build(tuning.MODEL)
        model.load_state_dict(training.model.state_dict())
        numbers = training.feed.samples.numbers(training.samples_seen)
        outcome = training.step()
    start = 1 / (4 * tune.beta**2) if kind == "ipo" else math.log(2)
    assert (first.loss_sum / first.count).item() == pytest.approx(start, rel=1e-12)
    assert int(first.count) == 4
    losses = []
    for i in numbers:
        ratios = []
        for side in (0, 1):
            tokens, counts = data.at(2 * i + side)
            counted = torch.from_numpy(counts[1:])
            with torch.no_grad():
                reference = tuning.logp(base, tokens.tolist())[counted]
            ratio = tuning.logp(model, tokens.tolist())[counted] - reference
            ratios.append(ratio.mean() if kind == "ipo" else ratio.sum())
        delta = ratios[0] - ratios[1]
        if kind == "ipo":
            losses.append((delta - 1 / (2 * tune.beta)) ** 2)
        else:
            e = tune.flipped
            losses.append(-(1 - e) * F.logsigmoid(tune.beta * delta) - e * F.logsigmoid(-tune.beta * delta))
    loss = torch.stack(losses).mean()
    loss.backward()
    assert_same(outcome.loss_sum / outcome.count, loss.detach())
    assert_same(outcome.norm, tuning.norm(model))


PLANS = [
    Plan(tp=2),
    *(
        pytest.param(plan, marks=pytest.mark.slow)
        for plan in (Plan(dp=2), Plan(cp=2), Plan(pp=2), Plan(cp=2, tp=2), Plan(tp=2, dp=2, sequence_parallel=True))
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_any_plan_and_micro_batch_give_the_same_losses(plan: Plan, tmp_path: Path) -> None:
    run = tuning.settings(tmp_path / "alone", tuning.start(tmp_path), eval_every=2, steps=3, dropout=0.1)
    _check_plan(plan, run, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(dp=2, ep=2)], ids=str)
def test_experts_under_any_plan(plan: Plan, tmp_path: Path) -> None:
    model = tuning.MODEL.replace(moe=MoeConfig(experts=4, active=2, ffn_width=12, balance_weight=0.0))
    run = tuning.settings(tmp_path / "alone", tuning.start(tmp_path, model), model, steps=2)
    _check_plan(plan, run, tmp_path)


def _check_plan(plan: Plan, alone: RunConfig, tmp_path: Path) -> None:
    feed = preference_feed(pairs(), pairs(5), KINDS["dpo"])
    tuning.fit(alone, feed)
    several = alone.replace(runs=tmp_path / "several", plan=plan, train=alone.train.replace(micro_batch=1))
    in_world(plan.world, tuning.fit, several, feed)
    assert len(tuning.history(alone)) >= 2 * alone.train.steps
    assert tuning.history(several)[:2] == pytest.approx(tuning.history(alone)[:2], rel=1e-10)
    assert tuning.history(several) == pytest.approx(tuning.history(alone), rel=1e-9)
    ours, theirs = (np.load(next(run.folder.glob("reference-*.npy"))) for run in (several, alone))
    assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "adapters"])
def test_resumed_bit_for_bit_without_the_file_of_scores(lora: LoraConfig | None, tmp_path: Path) -> None:
    """Deleted and damaged: the scores are those of the initial model again, not of the trained one."""
    feed = preference_feed(pairs(), NONE, KINDS["dpo"])
    whole = tuning.settings(tmp_path / "whole", tuning.start(tmp_path), tuning.MODEL.replace(lora=lora))
    tuning.fit(whole, feed)
    for number, damaged in enumerate((None, b"", b"\x93NUMPY\x01\x00garbage")):
        resumed = whole.replace(runs=tmp_path / str(number))
        shutil.copytree(whole.folder / "step-2", resumed.folder / "step-2")
        if damaged is not None:
            (resumed.folder / next(whole.folder.glob("reference-*.npy")).name).write_bytes(damaged)
        tuning.fit(resumed, feed)
        ours = tuning.weights(resumed)
        for name, x in tuning.weights(whole).items():
            assert torch.equal(x, ours[name]), name


def test_another_loss_cannot_resume(tmp_path: Path) -> None:
    run = tuning.settings(tmp_path, tuning.start(tmp_path), steps=2)
    tuning.fit(run, preference_feed(pairs(), NONE, KINDS["dpo"]))
    more = run.replace(train=run.train.replace(steps=3))
    for tune, message in ((TuneConfig(beta=0.2), "beta is 0.2, and was 0.3"), (KINDS["ipo"], "loss is ipo")):
        other: MakeFeed = preference_feed(pairs(), NONE, tune)
        with pytest.raises(DataError, match=message):
            tuning.fit(more, other)
        with pytest.raises(DataError, match=rf"{message}.*; use that one, or use another run name$"):
            Trainer(more, feed=other)  # before it loads anything
    longer = more.replace(data=more.data.replace(sequence=56))
    with pytest.raises(ConfigError, match="set --sequence 48, or use another run name"):
        Trainer(longer, feed=preference_feed(pairs(), NONE, KINDS["dpo"]))


ROWS = [
    {"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {a + b + 1}"} for a in range(3) for b in range(3)
]


def test_command_line_prefers_the_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start, file = tuning.start(tmp_path), tuning.write_rows(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    flags = [
        "--device",
        "cpu",
        "--tune.epochs",
        "8",
        "--train.batch",
        "3",
        "--train.lr",
        "3e-3",
        "--train.save_every",
        "0",
    ]
    monkeypatch.setattr(preferences, "SCORING_REPORT_S", 0.0)
    main(["finetune", str(start), "--method", "dpo", "--data", str(file), "--held_out", str(file), *flags])
    told = capsys.readouterr().out
    assert told.count(f"scoring {len(ROWS)} pairs with the reference model, once") == 2, "those held out too"
    assert told.count("scored 100% of the pairs") == 2
    rows = tuning.read_rows(tmp_path / "runs" / "dpo")
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert losses[-1] < 0.7 * math.log(2)


def test_pairs_that_are_equal_once_they_are_cut(tmp_path: Path) -> None:
    """Their gradients would cancel, and the run would train on nothing."""
    start, prompt = tuning.start(tmp_path), "a long question, longer than a sequence of this run"
    rows = [{"prompt": "a", "chosen": prompt + " yes", "rejected": prompt + " no"}]
    file, tune = tuning.write_rows(tmp_path / "rows.jsonl", rows), TuneConfig(truncate=True)
    with pytest.raises(DataError, match="line 1 has the same first 8 tokens in 'chosen' and 'rejected'"):
        Tuner(tuned_run(start, runs=tmp_path, device="cpu", sequence=8), file, "dpo", tune)
    Tuner(tuned_run(start, runs=tmp_path, device="cpu"), file, "dpo", tune)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"tune.beta is 0"):
        TuneConfig(beta=0)
    with pytest.raises(ConfigError, match=r"tune.flipped 0.1 belongs to"):
        TuneConfig(loss="ipo", flipped=0.1)
    with pytest.raises(DataError, match="there are no pairs"):
        preference_feed(NONE, NONE, TuneConfig())
    assert SequenceLogprobs.__doc__
