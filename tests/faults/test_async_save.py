"""A checkpoint written while training continues has the values of the step at which it was started."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from colonnade.checkpoint import atomic_folder as folders
from colonnade.checkpoint import native
from colonnade.checkpoint.dcp_storage import Writer
from colonnade.config import Plan, RunConfig
from colonnade.errors import CheckpointError
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train import Trainer
from colonnade.train.loop import train
from colonnade.train.training_state import TrainingState
from tests.corpora import tensors
from tests.worlds import run as in_world


def _save_at_two(config: RunConfig) -> int:
    """Steps taken while the checkpoint of step 2 waited to be written."""
    gate, real = threading.Event(), Writer.write_data
    if not config.train.async_save:
        gate.set()

    def write_data(self: Writer, *args: Any) -> Any:
        assert gate.wait(60)
        return real(self, *args)

    with DistributedContext.build(config.plan, "cpu") as context, TrainingState(config, context) as training:
        with patch.object(Writer, "write_data", write_data):
            for _ in range(2):
                training.step()
            training.save()
            for _ in range(3):
                training.step()
                if config.train.async_save:
                    assert training.finish_save() is None and training.checkpoint is None
            gate.set()
            training.finish_save(wait=True)
            assert training.checkpoint == config.folder / "step-2"
        return training.steps_taken


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [Plan(), Plan(tp=2)], ids=["one", "tp2"])
def test_async_checkpoint_has_the_state_of_its_step(config: RunConfig, plan: Plan) -> None:
    for name, behind in (("behind", True), ("before", False)):
        it = config.replace(name=name, plan=plan, train=config.train.replace(async_save=behind))
        assert in_world(plan.world, _save_at_two, it) == [5] * plan.world
    assert tensors(config.runs / "behind" / "step-2") == tensors(config.runs / "before" / "step-2")
    for name in ("checkpoint.json", "tensors.json"):
        one, other = ((config.runs / it / "step-2" / name).read_text() for it in ("behind", "before"))
        assert one.replace("behind", "before").replace('"async_save": true', '"async_save": false') == other


@pytest.mark.slow
def test_async_and_blocking_saves_are_equal(config: RunConfig) -> None:
    for behind in (True, False):
        Trainer(config.replace(name=str(behind), train=config.train.replace(async_save=behind, save_every=1))).fit()
    for step in range(1, 13):
        assert tensors(config.runs / "True" / f"step-{step}") == tensors(config.runs / "False" / f"step-{step}")


def _fails_on_rank_1(config: RunConfig) -> tuple[int, str]:
    """The second save fails on one rank; returns the number of steps taken and the error message."""
    real, rank = Writer.write_data, dist.get_rank()
    begun: list[Path] = []

    def write_data(self: Writer, *args: Any) -> Any:
        begun.append(self.folder)
        if rank == 1 and len(begun) == 2:
            raise OSError(5, "Input/output error")
        return real(self, *args)

    with patch.object(Writer, "write_data", write_data), pytest.raises(CheckpointError) as caught:
        train(config)
    return len(begun), str(caught.value)


def test_async_save_failure_ends_the_run_on_every_rank(config: RunConfig) -> None:
    outcomes = in_world(2, _fails_on_rank_1, config.replace(plan=Plan(tp=2)))
    assert outcomes[0] == outcomes[1] == (2, f"{config.folder}/step-8: Input/output error (rank 1)")
    assert [step for step, _ in folders.list_steps(config.folder)] == [4]
    assert not list(config.folder.glob(".*"))
    assert native.newest(config.folder) == config.folder / "step-4"


def test_second_save_waits_for_the_first(config: RunConfig) -> None:
    """Writing is slower than a step, and each step saves: all checkpoints are written, one at a time."""
    real = Writer.write_data
    under_way, most = [0], [0]

    def write_data(self: Writer, *args: Any) -> Any:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        threading.Event().wait(0.05)
        done = real(self, *args)
        under_way[0] -= 1
        return done

    with patch.object(Writer, "write_data", write_data):
        Trainer(config.replace(train=config.train.replace(steps=4, save_every=1, warmup=1))).fit()
    assert [step for step, _ in folders.list_steps(config.folder)] == [4, 3, 2, 1]
    assert most == [1]
