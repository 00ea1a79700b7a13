"""A mixture-of-experts training step copies no host values to the device.

From unpinned memory such a copy waits for all queued GPU work, and cannot be captured in a CUDA graph. Other
synchronisations show on a GPU only: tests/gpu/test_train_gpu.py.
"""

from typing import Any

import pytest
import torch

from colonnade.config import ModelConfig, MoeConfig, Plan
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.train_step import TrainStep
from colonnade.verify.trial import RAGGED, TRAIN, Trial, batch
from tests.routers import KINDS, kind_of, moe_of


def model_of(moe: MoeConfig) -> ModelConfig:
    return ModelConfig(vocab_size=53, layers=2, width=16, heads=4, ffn_width=16, context=64, moe=moe)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", KINDS)
def test_training_step_copies_no_host_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = moe_of(name, capacity=1.0)
    if kind_of(name) == "task":
        moe = moe.replace(router=moe.router.replace(task=0))
    config = model_of(moe)
    with DistributedContext.build(Plan()) as context:
        trial = Trial.start(config, context, 1)
        step = TrainStep(trial.model, trial.masters, trial.optimizer, TRAIN, trial.world)
        batches = [batch(RAGGED, i, i, config) for i in range(2)]
        right: Any = torch.tensor

        def guarded(data: Any, **options: Any) -> torch.Tensor:
            assert "device" not in options, "this copy synchronises; torch.full fills on the device"
            return right(data, **options)

        monkeypatch.setattr(torch, "tensor", guarded)
        outcome = step(0, batches)
        assert outcome.moe is not None and outcome.norm.isfinite()
