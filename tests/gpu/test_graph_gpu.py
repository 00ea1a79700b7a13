"""A training step as a CUDA graph is bitwise equal to the eager step: clipped, resumed, validated."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.config import DataConfig, ModelConfig, Plan, RunConfig, TrainConfig
from colonnade.data import build
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train import Trainer
from colonnade.train.cuda_graph import GraphedForwardBackward
from colonnade.train.training_state import TrainingState

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic

# torch.compile, which the loss uses on a GPU, emits warnings of its own.
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ["column", "row", "share", "whole", "bears", "stands", "weight", "of", "the", "and"]
MODEL = ModelConfig(vocab_size=300, layers=2, width=128, heads=4, kv_heads=2, ffn_width=256, context=64, tied=True)
STEPS = 6


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    texts = [(str(i), " ".join(WORDS[(i * j + j) % 10] for j in range(8 + 7 * i % 90))) for i in range(200)]
    build(texts, tmp_path / "corpus", vocab_size=300, validation_share=0.2)
    t = TrainConfig(
        steps=STEPS, batch=8, micro_batch=8, warmup=2, dtype="bfloat16", save_every=0, eval_every=0, lr=1e-2,
        min_lr=1e-3, log_every=1, deterministic=True,
    )  # fmt: skip
    data = DataConfig(path=tmp_path / "corpus", sequence=64, separate_documents=False)
    return RunConfig(name="it", runs=tmp_path, device="cuda", model=MODEL, data=data, train=t)


def train_to_end(run: RunConfig) -> dict[str, bytes]:
    """Train; return the last checkpoint's tensors as bytes."""
    Trainer(run).fit()
    return {path.name: path.read_bytes() for path in sorted((run.folder / f"step-{STEPS}").glob("*.safetensors"))}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1},
    "clipped": {"clip": 0.01},
    "one pass": {"clip": 0.01, "fused_adamw": True, "dropout": 0.1},
    "validated": {"eval_every": 2},
    "compiled": {"compile": True, "dropout": 0.1},
    "recomputed": {"recompute": "full", "dropout": 0.1},
    "offloaded": {"offload": "optimizer"},
    "float16, overflows": {"dtype": "float16", "loss_scale": 2.0**32, "loss_scale_steps": 2},
    "float32": {"dtype": "float32"},
}


@pytest.mark.parametrize("case", CASES)
def test_graphed_run_equals_eager_run_bitwise(config: RunConfig, case: str) -> None:
    eager = config.replace(name="eager", train=config.train.replace(**CASES[case]))
    graphed = config.replace(name="graphed", train=eager.train.replace(cuda_graph=True))
    assert train_to_end(graphed) == train_to_end(eager)


def test_resume_with_and_without_graph_is_bitwise_exact(config: RunConfig) -> None:
    t = config.train.replace(save_every=4, dropout=0.1, cuda_graph=True)
    whole = train_to_end(config.replace(name="whole", train=t))
    for graphed in (True, False):
        again = config.replace(name=f"again-{graphed}", train=t.replace(cuda_graph=graphed))
        shutil.copytree(config.runs / "whole" / "step-4", again.folder / "step-4")
        assert train_to_end(again) == whole


def test_ragged_documents_have_graphs_of_their_own(config: RunConfig) -> None:
    data = config.data.replace(separate_documents=True)
    eager = config.replace(name="eager", data=data)
    graphed = config.replace(name="graphed", data=data, train=config.train.replace(cuda_graph=True))
    assert train_to_end(graphed) == train_to_end(eager)


def test_replay_does_not_synchronise_and_reports_memory(config: RunConfig) -> None:
    config = config.replace(
        train=config.train.replace(cuda_graph=True, deterministic=False, fused_adamw=True, steps=20)
    )
    with DistributedContext.build(config.plan, config.device) as context:
        training = TrainingState(config, context)
        outcomes = [training.step() for _ in range(4)]
        passes = training._step.forward_backward
        assert isinstance(passes, GraphedForwardBackward) and len(passes._graphs) == 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            outcomes += [training.step() for _ in range(4)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses = [float(outcome.loss_sum) for outcome in outcomes]
        assert len(set(losses)) == len(losses), "each step must return its own loss tensor"
        assert losses[-1] < losses[0]
        assert outcomes[-1].memory_bytes >= 0.9 * outcomes[1].memory_bytes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_collectives_are_captured(config: RunConfig, sequence_parallel: bool) -> None:
    plan = Plan(tp=2, sequence_parallel=sequence_parallel)
    eager = config.replace(name="eager", plan=plan)
    graphed = config.replace(name="graphed", plan=plan, train=config.train.replace(cuda_graph=True))
    assert train_to_end(graphed) == train_to_end(eager)
