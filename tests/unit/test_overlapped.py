"""Overlapped tensor parallelism of the benchmarks computes what the Transformer does, in float64 over gloo."""

import pytest
import torch

from colonnade.model import Transformer
from tests.overlapped import CONFIG, KINDS, gradients, laid
from tests.worlds import assert_same, run

pytestmark = pytest.mark.xdist_group("worlds")


def compare() -> int:
    with laid("cpu") as ground:
        exact = gradients(ground, Transformer, torch.float64)
        for kind in KINDS:
            found = gradients(ground, kind, torch.float64)
            assert found.keys() == exact.keys()
            for name, value in exact.items():
                assert_same(found[name], value, what=f"{kind.__name__}: {name}")
    return len(exact)


@pytest.mark.parametrize("world", [2, 4])
def test_overlapped_blocks_have_the_transformers_loss_and_gradients(world: int) -> None:
    assert run(world, compare) == [len(list(Transformer(CONFIG, device="meta").parameters())) + 1] * world
