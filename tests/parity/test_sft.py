"""Supervised fine-tuning equals plain torch under any plan and micro-batch, and resumes bit for bit."""

import shutil
from pathlib import Path

import pytest
import torch

from colonnade.cli import main
from colonnade.config import Plan, TuneConfig
from colonnade.errors import ConfigError, DataError
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.training_state import TrainingState
from colonnade.tune import chats
from colonnade.tune.chats import Conversation, Conversations
from colonnade.tune.packing import sft_feed
from colonnade.tune.tuner import Tuner, log_interval, tuned_run
from tests import tuning
from tests.models import build
from tests.worlds import assert_same
from tests.worlds import run as in_world


def conversations(count: int = 10) -> Conversations:
    """Rows of 2 to 24 tokens; between one and all of them count."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for i in range(count):
        n = int(torch.randint(2, 25, (1,), generator=generator))
        counts = [False, *(torch.rand(n - 1, generator=generator) < 0.2 + 0.2 * (i % 4)).tolist()]
        counts[-1] = True
        rows.append(Conversation(torch.randint(301, (n,), generator=generator).tolist(), counts))
    return Conversations(rows)


def test_loss_and_gradient_equal_plain_torch(tmp_path: Path) -> None:
    run, data = tuning.settings(tmp_path, tuning.start(tmp_path), micro_batch=3), conversations()
    reference = build(tuning.MODEL)
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=sft_feed(data, Conversations([]))) as training,
    ):
        rows = [data.at(i) for i in training.feed.samples.numbers(0)]
        total, count = torch.zeros((), dtype=torch.float64), 0
        for tokens, counts in rows:
            counted = torch.from_numpy(counts[1:])
            total = total - tuning.logp(reference, tokens.tolist())[counted].sum()
            count += int(counted.sum())
        (total / count).backward()
        outcome = training.step()
    assert int(outcome.count) == count
    assert_same(outcome.loss_sum / outcome.count, total.detach() / count)
    assert_same(outcome.norm, tuning.norm(reference))


PLANS = [
    Plan(dp=2),
    Plan(cp=2, tp=2),
    Plan(pp=2),
    *(
        pytest.param(plan, marks=pytest.mark.slow)
        for plan in (Plan(tp=2), Plan(cp=2), Plan(tp=2, dp=2, sequence_parallel=True))
    ),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_any_plan_and_micro_batch_give_the_same_losses(plan: Plan, tmp_path: Path) -> None:
    start, data = tuning.start(tmp_path), conversations()
    feed = sft_feed(data, conversations(5))
    alone = tuning.settings(tmp_path / "alone", start, eval_every=2, steps=2)
    tuning.fit(alone, feed)
    several = alone.replace(runs=tmp_path / "several", plan=plan, train=alone.train.replace(micro_batch=1))
    in_world(plan.world, tuning.fit, several, feed)
    assert len(tuning.history(alone)) == 2 * 2 + 1
    assert tuning.history(several) == pytest.approx(tuning.history(alone), rel=1e-10)


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    start, feed = tuning.start(tmp_path), sft_feed(conversations(), Conversations([]))
    whole = tuning.settings(tmp_path / "whole", start)
    tuning.fit(whole, feed)
    resumed = whole.replace(runs=tmp_path / "resumed")
    shutil.copytree(whole.folder / "step-2", resumed.folder / "step-2")
    tuning.fit(resumed, feed)
    ours = tuning.weights(resumed)
    for name, x in tuning.weights(whole).items():
        assert torch.equal(x, ours[name]), name
    shutil.rmtree(resumed.folder / "step-4")
    with pytest.raises(DataError, match="different rows"):
        tuning.fit(resumed, sft_feed(conversations(9), Conversations([])))


ROWS = [
    {"messages": [{"role": "user", "content": f"{a} + {b}"}, {"role": "assistant", "content": str(a + b)}]}
    for a in range(3)
    for b in range(3)
]


def test_tuner_lowers_the_loss(tmp_path: Path) -> None:
    file = tuning.write_rows(tmp_path / "rows.jsonl", ROWS)
    train = tuning.TRAIN.replace(lr=3e-3, batch=3, micro_batch=3, save_every=0)
    run = tuned_run(tuning.start(tmp_path), runs=tmp_path, device="cpu", train=train)
    assert run.data.sequence == tuning.MODEL.context
    tuner = Tuner(run, file, "sft", TuneConfig(epochs=4), held_out=file, set_steps=True)
    assert tuner.run.train.steps == 12
    first = Tuner(run.replace(name="one"), file, "sft", TuneConfig(epochs=0.1), held_out=file, set_steps=True).fit()
    summary = tuner.fit()
    assert summary.validation_loss is not None
    assert first.validation_loss is not None
    assert summary.validation_loss < 0.7 * first.validation_loss


def test_rows_are_reported_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "ROWS_BETWEEN_REPORTS", 2)
    file, lines = tuning.write_rows(tmp_path / "rows.jsonl", ROWS[:5]), list[str]()
    Tuner(tuned_run(tuning.start(tmp_path), runs=tmp_path, device="cpu"), file, report=lines.append)
    assert lines == [f"tokenised {count} rows of {file}" for count in (2, 4)]


def test_lines_of_metrics() -> None:
    assert [log_interval("sft", steps) for steps in (1, 39, 40, 200, 10_000)] == [1, 1, 2, 10, 10]
    assert log_interval("grpo", 1000) == 1


def test_refusals(tmp_path: Path) -> None:
    start, file = tuning.start(tmp_path), tuning.write_rows(tmp_path / "rows.jsonl", ROWS)
    run = tuned_run(start, runs=tmp_path, device="cpu")
    with pytest.raises(ConfigError, match=r"method stf is unknown; did you mean 'sft'"):
        Tuner(run, file, "stf")
    with pytest.raises(ConfigError, match=r"sequence 65 is longer than the context of .*start, 64"):
        tuned_run(start, sequence=65)
    with pytest.raises(ConfigError, match=r"train.pretrained_checkpoint other is not the model"):
        tuned_run(start, train=tuning.TRAIN.replace(pretrained_checkpoint="other"))
    with pytest.raises(ConfigError, match=r"method sft does not use tune.beta \(a setting of dpo\); remove it"):
        Tuner(run, file, "sft", TuneConfig(beta=0.2))
    with pytest.raises(DataError, match="has no rows"):
        Tuner(run, tuning.write_rows(tmp_path / "none.jsonl", []))
    with pytest.raises(DataError, match=r"line 1 has 2[0-9] tokens, more than a sequence of 8"):
        Tuner(tuned_run(start, sequence=8, runs=tmp_path), file)
    with pytest.raises(DataError, match="no rows are held out"):
        Tuner(run.replace(train=run.train.replace(eval_every=1)), file)
    with pytest.raises(ConfigError, match=r"data.separate_documents is False"):
        Tuner(run.replace(data=run.data.replace(separate_documents=False)), file)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    start, file = tuning.start(tmp_path), tuning.write_rows(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    common = ["finetune", str(start), "--data", str(file), "--device", "cpu", "--train.save_every", "0"]
    main([*common, "--name", "a", "--tune.epochs", "2", "--train.batch", "3", "--held_out", str(file)])
    told = capsys.readouterr()
    assert f"reading {file}" in told.err
    assert "derived: train.steps 6, train.log_every 1" in told.err
    assert f"loading {start}\n" in told.out
    assert all(f"step {step}/6  loss" in told.out for step in range(1, 7))
    steps = [path.name for path in (tmp_path / "runs" / "a").glob("step-*")]
    assert steps == ["step-6"]
    main([*common, "--name", "b", "--train.steps", "2", "--train.micro_batch", "2", "--train.log_every", "2"])
    told = capsys.readouterr()
    assert "derived" not in told.err
    assert "step 1/2" not in told.out
    assert "step 2/2" in told.out
    assert (tmp_path / "runs" / "b" / "step-2").is_dir()
    for flags, message in (
        (["--lora.rank", "0"], "rank"),
        (["--tune.beta", "-1"], "beta"),
        (["--sequence", "4"], "has 2"),
        (["--train.pretrained_checkpoint", "x"], "Unrecognized options: --train.pretrained_checkpoint"),
    ):
        with pytest.raises(SystemExit) as end:
            main([*common, *flags])
        assert end.value.code == (2 if message.startswith("Unrecognized") else 1)
        assert message in capsys.readouterr().err
