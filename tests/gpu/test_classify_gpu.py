"""Fine-tuning on a GPU: CUDA graphs equal eager steps, no synchronisation, skipped steps keep the schedule."""

from pathlib import Path

import pytest
import torch

from colonnade.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.lr_schedule import learning_rate
from colonnade.train.trackers import read_rows
from colonnade.train.training_state import TrainingState
from colonnade.tune import Example, fit
from colonnade.tune.classify import example_feed

pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = ModelConfig(
    family="bert", vocab_size=100, layers=2, width=128, heads=4, ffn_width=256, context=64, causal=False, segments=2,
    positions="learned", norm="layernorm", norm_order="post", embed_norm=True, gated=False, activation="gelu",
    qkv_bias=True, out_bias=True, ffn_bias=True, tied=True, task_head="classes", classes=3,
)  # fmt: skip
TRAIN = TrainConfig(
    steps=8, batch=8, micro_batch=8, lr=1e-3, min_lr=1e-4, warmup=2, dtype="bfloat16", eval_every=0, save_every=0,
    dropout=0.1, attention_dropout=0.1, label_smoothing=0.1, fused_adamw=True, log_every=1,
)  # fmt: skip
EXAMPLES = [Example([1, *[3 + i % 3] * (1 + i % 7), *range(10, 12 + i)], i % 3, None) for i in range(40)]


def config(runs: Path, **train: object) -> RunConfig:
    return RunConfig(
        name="it", runs=runs, device="cuda", model=MODEL, data=DataConfig(sequence=64), train=TRAIN.replace(**train)
    )


def losses(run: RunConfig) -> list[float]:
    fit(run, EXAMPLES)
    return [row["loss"] for row in read_rows(run.folder) if "loss" in row]


def test_graphed_step_matches_eager_step(tmp_path: Path) -> None:
    plain, graphed = (losses(config(tmp_path / str(on), cuda_graph=on)) for on in (False, True))
    assert len(plain) == 8
    # A graph's micro-batches have one padded shape, for which other GEMM kernels may be chosen.
    assert graphed == pytest.approx(plain, abs=2e-2)


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_do_not_synchronise_or_advance_schedule(fused: bool, tmp_path: Path) -> None:
    run = config(tmp_path, dtype="float16", loss_scale=2.0**40, fused_adamw=fused, steps=40)
    with (
        DistributedContext.build(run.plan, run.device) as context,
        TrainingState(run, context, feed=example_feed(run, EXAMPLES)) as training,
    ):
        outcomes = [training.step()]
        torch.cuda.set_sync_debug_mode("error")
        try:
            outcomes += [training.step() for _ in range(run.train.steps - 1)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        updates = 0
        for outcome in outcomes:
            assert float(outcome.lr) == pytest.approx(learning_rate(updates, run.train), rel=1e-6)
            updates += bool(outcome.norm.isfinite())
        assert updates == training.optimizer.steps < run.train.steps
        assert updates > 5
