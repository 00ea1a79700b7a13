"""Overlapped tensor parallelism of the benchmarks computes what the Transformer does, in float64 over gloo."""

from _overlapped import Halved, Overlapped, Ringed
from typing import Any

import pytest
import torch

from _copies import Plain
from _jobs import filled, random_batch
from colonnade.config import Plan
from colonnade.config.presets import preset
from colonnade.model import Transformer
from colonnade.parallel.layout import layout_of
from colonnade.parallel.mesh import Ground
from colonnade.train import norm
from colonnade.train.lay import Terms
from colonnade.train.step import passes
from tests.worlds import assert_same, run

pytestmark = pytest.mark.xdist_group("worlds")

CONFIG = preset("gpt2").but(vocab_size=208, layers=3, width=24, heads=4, ffn_width=36, context=12)


def gradients(ground: Ground, kind: type[Transformer]) -> dict[str, torch.Tensor]:
    """And the loss, of random weights; biases are not 0, where adding one on each rank could hide."""
    model: Any = filled(kind(CONFIG, ground.axes, dtype=torch.float64))
    if isinstance(model, Overlapped):
        model.prepare(Plain(ground.axes.tp), lambda function: function)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            if p.dim() == 1:
                p.add_(torch.linspace(-0.3, 0.3, len(p), dtype=p.dtype) / (1 + i))
            else:
                p.mul_(5)
    batch = random_batch(CONFIG, 12, 4, 0, ground.device)
    loss = passes(model, batch, torch.tensor(48), Terms(0.1))
    # Which rank has which token differs, so only the sums of what each rank adds are the same.
    norm.sum_partial(dict(model.named_parameters()), layout_of(model), ground.axes.tp)
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None for grad in found.values())
    return found | {"loss": loss}


def compare() -> int:
    with Ground.build(Plan(tp=torch.distributed.get_world_size(), sequence_parallel=True), "cpu") as ground:
        exact = gradients(ground, Transformer)
        for kind in (Halved, Ringed):
            found = gradients(ground, kind)
            assert found.keys() == exact.keys()
            for name, value in exact.items():
                assert_same(found[name], value, what=f"{kind.__name__}: {name}")
    return len(exact)


@pytest.mark.parametrize("world", [2, 4])
def test_overlapped_blocks_have_the_transformers_loss_and_gradients(world: int) -> None:
    assert run(world, compare) == [len(list(Transformer(CONFIG, device="meta").parameters())) + 1] * world
