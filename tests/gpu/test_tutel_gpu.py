"""The Tutel-compatible layer on a GPU: equal to the CPU, and usable under autocast."""

import pytest
import torch

from colonnade.compat.tutel import moe, system
from tests.worlds import assert_same


def _layer(**options: object) -> moe.moe_layer:
    experts = {"type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 32}
    return moe.moe_layer({"type": "top", "k": 2, **options}, 16, experts, seeds=(1, 2, 3))


@pytest.mark.parametrize("factor", [1.0, 0.0, -1.0])
def test_equals_the_cpu(factor: float) -> None:
    x = torch.randn(40, 16, dtype=torch.float64)
    results = []
    for device in ("cpu", "cuda"):
        layer = _layer(capacity_factor=factor).double().to(device)
        y = layer(x.to(device))
        (y.square().sum() + layer.l_aux).backward()
        results.append([y.detach().cpu(), *(p.grad.cpu() for p in layer.parameters())])
    for ours, reference in zip(results[1], results[0], strict=True):
        assert_same(ours, reference)


def test_autocast_and_session() -> None:
    env = system.init_data_model_parallel(backend="nccl")
    assert env.local_device.type == "cuda"
    assert system.get_local_session().is_cuda
    layer = _layer(fp32_gate=True).to(env.local_device)
    x = torch.randn(40, 16, device=env.local_device)
    start = system.record_time()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x)
    y.square().mean().backward()
    assert y.dtype == layer.l_aux.dtype == torch.float32
    assert system.record_time() > start
    exact = _layer(fp32_gate=True).to(env.local_device)(x)
    assert (y - exact).norm() / exact.norm() < 2e-2
