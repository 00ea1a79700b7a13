"""A batch with a non-finite loss updates nothing, is named and counted, and tolerated up to a limit."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from colonnade.checkpoint import native
from colonnade.config import Plan, RunConfig
from colonnade.data import Corpus, Loader
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train import Trainer, train_step
from colonnade.train.loop import train
from colonnade.train.lr_schedule import learning_rate
from colonnade.train.metrics import Diverged
from colonnade.train.training_state import TrainingState
from tests.corpora import tensors
from tests.worlds import run as in_world


@contextmanager
def with_bad_loss(*calls: int, value: float = float("nan")) -> Iterator[None]:
    """Replace the loss of the given forward passes of this process, counted from 0, by ``value``."""
    real, count = train_step.forward, iter(range(10**6))

    def forward(*args: object) -> Tensor:
        loss_sum = real(*args)  # type: ignore[arg-type]
        if next(count) not in calls:
            return loss_sum
        # An infinite loss with a finite gradient, as from a logit of -inf; or a NaN loss with NaN gradients.
        return loss_sum + value if value == float("inf") else loss_sum * value

    with patch.object(train_step, "forward", forward):
        yield


def _updates_nothing(config: RunConfig, value: float) -> None:
    """Data rank 1 of 2 has a bad second micro-batch in step 3 of a run over tp=2 and dp=2."""
    with DistributedContext.build(config.plan, "cpu") as context:
        training = TrainingState(config, context)
        is_bad_rank = context.axes.dp.rank == 1
        with with_bad_loss(*([2 * 2 + 1] if is_bad_rank else []), value=value):
            for _ in range(2):
                training.step()
            state = {**training.masters.local, **training.optimizer.state}
            before = {name: x.detach().clone() for name, x in state.items()}
            assert not training.step().norm.isfinite()
            assert all(torch.equal(x, before[name]) for name, x in state.items())
            assert (training.steps_taken, training.optimizer.steps) == (3, 2)
            training.step()
            assert training.optimizer.steps == 3
            assert not all(torch.equal(x, before[name]) for name, x in state.items())


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_batch_updates_nothing_on_any_rank(config: RunConfig, value: float) -> None:
    in_world(4, _updates_nothing, config.replace(plan=Plan(tp=2, dp=2)), value)


@pytest.mark.slow
def test_skipped_batches_are_named_and_survive_a_resume(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps 2 and 7 of 12 are bad (4 micro-batches a step); the run stops at 8, resumes, and ends the same."""
    t = config.train.replace(skip_bad_batches=2)
    with with_bad_loss(4, 25):
        Trainer(config.replace(name="whole", train=t)).fit()
    output = capsys.readouterr().out
    loader = Loader(Corpus(config.data.path).split("train"), config.data, t.batch, t.micro_batch)
    bad = ", ".join(map(str, loader.numbers(6 * t.batch)))
    assert f"step 7: the loss is nan on data rank 0 of 1; skipped samples {bad} (2 of at most 2 bad batches)" in output
    rows = [json.loads(line) for line in (config.runs / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" not in row and "lr" in row] == [2, 7]
    updates = [0, 1, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9]  # before each of the 12 steps
    assert [row["lr"] for row in rows if "lr" in row] == [learning_rate(i, t) for i in updates]
    assert [(row["step"], row["skipped"]) for row in rows if "skipped" in row] == [(2, 1), (7, 2)]
    with with_bad_loss(4, 25):
        Trainer(config.replace(train=t.replace(steps=8, schedule="constant"))).fit()
    meta = native.read_meta(config.folder / "step-8")
    assert (meta.step, meta.updates, meta.cursor["skipped"]) == (8, 6, 2)


def test_resumed_run_with_skipped_batches_is_the_same(config: RunConfig) -> None:
    t = config.train.replace(skip_bad_batches=1)
    with with_bad_loss(4):
        Trainer(config.replace(name="whole", train=t)).fit()
        whole = tensors(config.runs / "whole" / "step-12")
    half = config.replace(train=t)
    with (
        with_bad_loss(4),
        pytest.raises(KeyboardInterrupt),
        patch.object(TrainingState, "save", _stop_after(TrainingState.save)),
    ):
        Trainer(half).fit()
    assert Trainer(half).fit().steps == 12
    assert tensors(config.folder / "step-12") == whole


def _stop_after(save: Callable[[TrainingState], object]) -> Callable[[TrainingState], None]:
    def wrapped(self: TrainingState) -> None:
        save(self)
        raise KeyboardInterrupt

    return wrapped


def _diverges(config: RunConfig) -> str:
    with with_bad_loss(1, 4, 6), pytest.raises(Diverged) as caught:
        train(config)
    return str(caught.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("allowed", [0, 2])
def test_too_many_bad_batches_end_the_run_on_every_rank(config: RunConfig, allowed: int) -> None:
    t = config.train.replace(skip_bad_batches=allowed, save_every=1, log_every=2)
    output = in_world(2, _diverges, config.replace(plan=Plan(dp=2), train=t))
    assert output[0] == output[1]
    if allowed:
        assert output[0].startswith(
            "step 4: the loss is nan on data rank 0, 1 of 2; 2 bad batches were skipped before;"
        )
        assert f"the last good checkpoint is {config.folder}/step-3" in output[0]
    else:
        assert output[0].startswith(
            "step 1: the loss is nan on data rank 0, 1 of 2; no checkpoint has been written yet;"
        )
