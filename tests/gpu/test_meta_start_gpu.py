"""Sharded start on GPUs: no rank builds the whole model; running out of memory at start is explained.

pytest -q tests/gpu/test_meta_start_gpu.py        # two GPUs, about a minute
"""

import os
from pathlib import Path

import pytest
import torch

from colonnade.config import DataConfig, ModelConfig, Plan, RunConfig, TrainConfig
from colonnade.errors import CapacityError
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import launch
from colonnade.train import Trainer
from colonnade.train.training_state import TrainingState
from tests import corpora

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.filterwarnings("ignore")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
MODEL = ModelConfig(vocab_size=300, layers=16, width=512, heads=8, ffn_width=2048, context=64, tied=True)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    data = DataConfig(path=corpora.small(tmp_path / "corpus"), sequence=16)
    t = TrainConfig(
        steps=3, warmup=1, batch=4, micro_batch=1, dtype="bfloat16", compile=False, fused_adamw=False, eval_every=0
    )
    return RunConfig(name="it", runs=tmp_path, device="cuda", model=MODEL, data=data, train=t)


def _peak(run: RunConfig) -> float:
    """Peak memory while a run starts, in units of the full model; also takes one step."""
    with DistributedContext.build(run.plan, "cuda") as context:
        torch.cuda.reset_peak_memory_stats()
        with TrainingState(run, context) as training:
            peak = torch.cuda.max_memory_allocated() / (4 * MODEL.parameters)
            assert training.step().norm.isfinite()
        return peak


@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and this machine has {GPUS}")
@pytest.mark.parametrize("plan", [Plan(dp=2), Plan(cp=2)], ids=str)
def test_no_rank_allocates_the_whole_model(config: RunConfig, plan: Plan) -> None:
    """Half of the weights and of both moments is 1.5 models; a full copy of the weights would make it 2."""
    assert 1.4 < launch(_peak, (config.replace(plan=plan),), plan) < 1.7


def test_out_of_memory_at_start_is_explained(config: RunConfig) -> None:
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(8 * MODEL.parameters / total)
    try:
        with pytest.raises(CapacityError, match=r"out of memory on cuda:0 before the first step, which requested .* m"):
            Trainer(config).fit()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
