"""plan.tp_overlap by copy engines: loss and gradients of sequence parallelism, launched, compiled and as a graph."""

import json
import os
import sys

import pytest
import torch

from colonnade.config import Plan
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import launch
from colonnade.parallel.overlapped_matmul import CopyEngineTransfer
from tests.overlapped import GPT2, LLAMA, gradients, laid

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and this machine has {GPUS}"),
]
WAYS = {"launched": {}, "compiled": {"compiled": "inductor"}, "a graph": {"graphed": True}}


def errors(world: int) -> dict[str, float]:
    """The largest relative error by norm of each way, in float32."""
    worst = {}
    with DistributedContext.build(Plan(dp=world), "cuda"), laid("cuda") as context:
        mover = context.axes.row_transfer
        assert isinstance(mover, CopyEngineTransfer)
        for name, config in (("GPT-2", GPT2), ("Llama", LLAMA)):
            exact = gradients(context, config, torch.float32, None)
            for way, asked in WAYS.items():
                found = gradients(context, config, torch.float32, mover, **asked)
                gaps = {name: float((found[name] - x).norm() / x.norm()) for name, x in exact.items()}
                where = max(gaps, key=gaps.__getitem__)
                worst[f"{name}, {way}, {where}"] = gaps[where]
                if context.rank == 0:
                    print(json.dumps(worst), file=sys.stderr, flush=True)
    return worst


@pytest.mark.parametrize("world", [2, 4])
def test_copies_beside_products_change_no_numbers(world: int) -> None:
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs, and this machine has {GPUS}")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    worst = launch(errors, (world,), Plan(dp=world))
    assert len(worst) == 6
    assert max(worst.values()) < 1e-4, worst
