"""Overlapped tensor parallelism by copy engines: the Transformer's loss and gradients, launched and as a graph."""

import json
import os
import sys

import pytest
import torch

from colonnade.config import Plan
from colonnade.model import Transformer
from colonnade.parallel.launch import launch
from colonnade.parallel.mesh import Ground
from tests.overlapped import KINDS, gradients, laid

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and this machine has {GPUS}"),
]


def errors(world: int) -> dict[str, float]:
    """The largest relative error by norm of each way, in float32."""
    worst = {}
    with Ground.build(Plan(dp=world), "cuda"), laid("cuda") as ground:
        exact = gradients(ground, Transformer, torch.float32)
        for kind in KINDS:
            for graphed in (False, True):
                found = gradients(ground, kind, torch.float32, graphed=graphed)
                gaps = {name: float((found[name] - x).norm() / x.norm()) for name, x in exact.items()}
                where = max(gaps, key=gaps.__getitem__)
                worst[f"{kind.__name__}, graphed {graphed}, {where}"] = gaps[where]
                if ground.rank == 0:
                    print(json.dumps(worst), file=sys.stderr, flush=True)
    return worst


@pytest.mark.parametrize("world", [2, 4])
def test_copies_beside_products_change_no_numbers(world: int) -> None:
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs, and this machine has {GPUS}")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    worst = launch(errors, (world,), Plan(dp=world))
    assert len(worst) == 4
    assert max(worst.values()) < 1e-4, worst
