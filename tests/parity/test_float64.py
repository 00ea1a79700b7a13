"""A float64 step computes nothing in float32 unless intended: all layouts would share a wrong default dtype."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colonnade.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from colonnade.data import Batch
from colonnade.model.moe.routing_context import attach
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.train_step import evaluate
from colonnade.train.training_state import TrainingState
from colonnade.tune.classify import example_feed
from tests.models import BERTS, CONFIGS
from tests.parity.test_classify import examples
from tests.parity.train_cases import CASES, Run, micro_batches
from tests.routers import KINDS, config_of, moe_of

PACKAGE = Path(__file__).parents[2] / "colonnade"
ALLOWED = ("kernels/rotary.py", "train/optimizer.py")
"""Rotary angles; Adam's step counts."""
TRAIN = TrainConfig(
    steps=20, lr=3e-3, clip=0.1, dtype="float64", label_smoothing=0.05, dropout=0.1, attention_dropout=0.1,
    embedding_dropout=0.1, expert_dropout=0.1,
)  # fmt: skip


class NarrowDtypeRecorder(TorchDispatchMode):
    """Records where floating-point tensors narrower than float64 are made, except 0-dim ones that are 0 or 1."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
                continue
            if x.dim() == 0 and x.item() in (0, 1):
                continue
            ours = [f for f in traceback.extract_stack() if PACKAGE in Path(f.filename).parents]
            where = Path(ours[-1].filename).relative_to(PACKAGE).as_posix() if ours else "a backward pass"
            if where not in ALLOWED:
                self.found.add(f"{where}:{ours[-1].lineno if ours else ''} {func}")
        return out


MODELS: dict[str, ModelConfig] = {
    **{name: CASES[name] for name in ("gpt2", "qwen3", "bert")},
    **{name: CONFIGS[name] for name in ("olmoe_clipped", "latent_yarn_biased")},
    **{name: config_of(moe_of(name)) for name in KINDS},
    "capacity": config_of(
        moe_of("softmax", capacity=1.0, dropped_token_output="residual", priority=True, shared_width=5)
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_training_step_and_validation_stay_in_float64(name: str) -> None:
    it = Run.start(MODELS[name], DistributedContext.solo(), TRAIN.replace(fused_adamw=name == "gpt2"))
    batches = [batch(made, name) for made in micro_batches(0, it.context.axes.dp, MODELS[name])]
    with NarrowDtypeRecorder() as narrow:
        it.step(0, batches)
        evaluate(it.model, batches)
    assert not narrow.found


def batch(made: Batch, name: str) -> Batch:
    if name == "task":
        return Batch(**vars(made) | {"tasks_T": made.positions_T % 3})
    return made


def test_fine_tuning_stays_in_float64(tmp_path: Path) -> None:
    model = BERTS["post_encoder"].replace(task_head="classes", classes=3)
    train = TRAIN.replace(steps=2, batch=6, micro_batch=2, eval_every=0, log_every=1, expert_dropout=0.0)
    run = RunConfig(name="it", runs=tmp_path, device="cpu", model=model, data=DataConfig(sequence=32), train=train)
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=example_feed(run, examples())) as training,
    ):
        with NarrowDtypeRecorder() as narrow:
            training.step()
        assert not narrow.found


def test_recorder_sees_integer_division() -> None:
    with NarrowDtypeRecorder() as narrow:
        _ = torch.tensor(1) / torch.tensor(3)
    assert narrow.found == {"a backward pass: aten.div.Tensor"}


def test_python_float_loss_weight_keeps_float64_precision() -> None:
    loss = torch.ones((), dtype=torch.float64, requires_grad=True)
    attach(torch.zeros(2, dtype=torch.float64), loss, 0.1).sum().backward()
    assert loss.grad is not None
    assert loss.grad.item() == 0.1
