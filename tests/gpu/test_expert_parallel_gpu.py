"""Expert parallelism on two GPUs: every degree and number of parts gives the same layer, with one sync."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from colonnade.config import ModelConfig, MoeConfig, Plan
from colonnade.model import Transformer
from colonnade.model.moe import DispatchOptions
from colonnade.model.moe.dispatch import run_experts
from colonnade.model.moe.experts import Experts
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import launch

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore"),
]

CONFIG = ModelConfig(
    vocab_size=64, layers=1, width=256, heads=4, ffn_width=128, context=64,
    moe=MoeConfig(experts=16, active=4, ffn_width=128),
)  # fmt: skip


def _count_syncs(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], int]:
    """The result of ``run`` and how often it synchronised with the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            results = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return results, sum("synchronizing" in str(warning.message) for warning in seen)


def _check(plan: Plan) -> dict[str, float]:
    with DistributedContext.build(plan, "cuda") as context:
        model = Transformer(CONFIG, context.axes, device=context.device, dtype=torch.bfloat16)
        experts = model.blocks.get_submodule("0.ffn.experts")
        assert isinstance(experts, Experts)
        draw = torch.Generator("cuda").manual_seed(context.rank)
        with torch.no_grad():
            for w in experts.parameters():
                w.normal_(0, 0.06, generator=draw)
        x = torch.randn(3001, 256, device="cuda", generator=draw).bfloat16().requires_grad_()
        ids = torch.rand(3001, 16, device="cuda", generator=draw).topk(4).indices
        weights = torch.rand(3001, 4, device="cuda", generator=draw).requires_grad_()
        leaves = [x, weights, *experts.matrices]
        worst: dict[str, float] = {}
        exact: list[Tensor] = []
        for r in [d for d in (0, 1, 2) if d == 0 or plan.etp % d == 0]:
            for p in (1, 2, 4, 6) if r else (1,):

                def forward(r: int = r, p: int = p) -> list[Tensor]:
                    return [run_experts(x, ids, weights, experts, DispatchOptions(r, p))]

                def backward(y: Tensor) -> list[Tensor]:
                    return list(torch.autograd.grad(y, leaves, x.detach()))

                backward(*forward())  # compiles
                (y,), forward_syncs = _count_syncs(forward)
                grads, backward_syncs = _count_syncs(lambda y=y: backward(y))
                results = [y.detach(), *grads]
                exact = exact or results  # r = 0, without an all-to-all
                assert not r or (forward_syncs, backward_syncs) == (1, 0), (r, p, forward_syncs, backward_syncs)
                error = max(
                    float((a - b).float().norm() / b.float().norm()) for a, b in zip(results, exact, strict=True)
                )
                worst[f"r={r} p={p}"] = error
        return worst


@pytest.mark.parametrize("plan", [Plan(dp=2, ep=2), Plan(dp=2, etp=2)], ids=str)
def test_degrees_and_parts_agree_and_synchronise_once(plan: Plan) -> None:
    for case, error in launch(_check, (plan,), plan).items():
        assert error < 1e-2, (case, error)
