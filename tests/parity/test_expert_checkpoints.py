"""A checkpoint saved under one expert grid loads bitwise under every other, moments included."""

import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from colonnade.config import ModelConfig, MoeConfig, Plan, RouterConfig
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.optimizer import MOMENTS
from colonnade.verify.trial import Trial
from tests.worlds import run

MODEL = ModelConfig(
    vocab_size=29, layers=2, width=8, heads=2, head_width=4, ffn_width=12, context=16, ffn_bias=True,
    moe=MoeConfig(
        experts=4, active=2, ffn_width=12, shared_width=5, bias_rate=0.01, router=RouterConfig(kind="sigmoid")
    ),
)  # fmt: skip
PLANS = [
    Plan(),
    *(Plan(dp=2, ep=ep, etp=etp) for ep, etp in ((1, 1), (2, 1), (1, 2))),
    *(Plan(dp=4, ep=ep, etp=etp) for ep, etp in ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4))),
    Plan(tp=2, dp=2, ep=2, etp=2),
    Plan(pp=2, replicate=2, etp=2),
]
"""Every (W, E, Sh) of one, two and four processes, and two grids with other axes."""
STEPS = 3


def _fill(key: str, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())), dtype=torch.float64)


def _saved_tensors(trial: Trial) -> dict[str, tuple[str, Tensor]]:
    """The tensors that a rank saves, by key: the parameter with the same shape, and the tensor."""
    tensors = {f"weight/{name}": (name, w) for name, w in trial.masters.local.items()}
    return tensors | {
        f"{m}/{name}": (name, trial.optimizer.state[f"{m}/{name}"]) for m in MOMENTS for name in trial.masters.local
    }


def _write(plans: list[Plan], folder: Path) -> None:
    for plan in plans:
        with DistributedContext.build(plan) as context, torch.no_grad():
            trial = Trial.start(MODEL, context, 4)
            shapes = trial.model.global_shapes()
            for key, (name, tensor) in _saved_tensors(trial).items():
                tensor.copy_(trial.shard_of(name, _fill(key, shapes[name])))
            for name, buffer in trial.model.named_buffers():
                buffer.copy_(_fill(name, buffer.shape))
            trial.optimizer.steps = STEPS
            trial.save(folder / str(plan))


def _read(plans: list[Plan], folder: Path, others: int) -> int:
    """Load what ``others`` other plans wrote; returns the number of tensors compared."""
    compared = 0
    for plan in plans:
        with DistributedContext.build(plan) as context, torch.no_grad():
            trial = Trial.start(MODEL, context, 4)
            shapes, buffers = trial.model.global_shapes(), dict(trial.model.named_buffers())
            tensors = _saved_tensors(trial)
            after = PLANS.index(plan) + 1
            for wrote in (PLANS[after:] + PLANS[:after])[:others]:
                for tensor in (*(tensor for _, tensor in tensors.values()), *buffers.values()):
                    tensor.zero_()
                trial.optimizer.steps = 0
                trial.load(folder / str(wrote))
                for key, (name, tensor) in tensors.items():
                    assert torch.equal(tensor, trial.shard_of(name, _fill(key, shapes[name]))), (
                        f"{wrote} -> {plan}: {key}"
                    )
                for name, buffer in buffers.items():
                    assert torch.equal(buffer, _fill(name, buffer.shape)), f"{wrote} -> {plan}: {name}"
                assert trial.optimizer.steps == STEPS
                compared += len(tensors) + len(buffers)
    return compared


@pytest.mark.slow
@pytest.mark.parametrize("others", [1, pytest.param(len(PLANS), marks=pytest.mark.long)])
def test_any_grid_loads_the_checkpoint_of_any_other(others: int, tmp_path: Path) -> None:
    """Each grid loads the checkpoint of the next one; in `long` tests, those of all."""
    by_world = {world: [plan for plan in PLANS if plan.world == world] for world in (1, 2, 4)}
    for world, plans in by_world.items():
        run(world, _write, plans, tmp_path)
    for world, plans in by_world.items():
        assert min(run(world, _read, plans, tmp_path, others)) > 20
