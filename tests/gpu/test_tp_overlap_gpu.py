"""plan.tp_overlap with copy engines: loss and gradients under sequence parallelism, eager, compiled and graphed."""

import json
import os
import sys

import pytest
import torch

from colonnade.config import Plan
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import launch
from colonnade.parallel.overlapped_matmul import CopyEngineTransfer
from tests.tp_overlap import GPT2, LLAMA, gradients, tp_context

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and this machine has {GPUS}"),
]
MODES = {"eager": {}, "compiled": {"compiled": "inductor"}, "a graph": {"graphed": True}}


def errors(world: int) -> dict[str, float]:
    """The largest relative error of each mode, in float32."""
    worst = {}
    with DistributedContext.build(Plan(dp=world), "cuda"), tp_context("cuda") as context:
        transfer = context.axes.row_transfer
        assert isinstance(transfer, CopyEngineTransfer)
        for name, config in (("GPT-2", GPT2), ("Llama", LLAMA)):
            exact = gradients(context, config, torch.float32, None)
            for mode, options in MODES.items():
                got = gradients(context, config, torch.float32, transfer, **options)
                differences = {name: float((got[name] - x).norm() / x.norm()) for name, x in exact.items()}
                where = max(differences, key=differences.__getitem__)
                worst[f"{name}, {mode}, {where}"] = differences[where]
                if context.rank == 0:
                    print(json.dumps(worst), file=sys.stderr, flush=True)
    return worst


@pytest.mark.parametrize("world", [2, 4])
def test_overlap_does_not_change_gradients(world: int) -> None:
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs, and this machine has {GPUS}")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    worst = launch(errors, (world,), Plan(dp=world))
    assert len(worst) == 6
    assert max(worst.values()) < 1e-4, worst
