"""Fused AdamW on a GPU: bitwise equal to the reference, close to torch, without device synchronisation."""

import pytest
import torch

from colonnade.config import ModelConfig, TrainConfig
from colonnade.kernels import adamw
from colonnade.kernels.registry import choose
from colonnade.model import Loss, Packed, Stream, Transformer, initialise
from colonnade.parallel.axis import SOLO
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters
from colonnade.train.optimizer import AdamW, FusedAdamW
from colonnade.train.optimizer_step import OptimizerStep
from tests.adamw import SIZES, random_states, two_steps

pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = ModelConfig(vocab_size=301, layers=2, width=64, heads=4, ffn_width=100, context=64, tied=True)
TRAIN = TrainConfig(steps=9, warmup=0, lr=1e-2, min_lr=1e-3, weight_decay=0.3, clip=0.1, dtype="bfloat16")


@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("copy", [None, torch.bfloat16, torch.float16], ids=str)
def test_kernel_equals_reference_bitwise(gradient: torch.dtype, copy: torch.dtype | None) -> None:
    """Many weights, full and partial blocks; a skipped step changes nothing, even with infinite gradients."""
    weights = random_states(gradient, copy, "cuda", (*SIZES, (3000, 1001), (70000,)))
    run = choose("adamw", "cuda", torch.float32)
    assert run is not adamw.adamw
    for got, exact in zip(two_steps(run, weights), two_steps(adamw.adamw, weights), strict=True):
        assert torch.equal(got, exact)
    broken = [weight._replace(gradient=weight.gradient * torch.inf) for weight in weights]
    for got, was in zip(
        two_steps(run, broken, skip=1), (x for w in weights for x in w[1:] if x is not None), strict=True
    ):
        assert torch.equal(got, was)


def test_unaligned_slices_leave_neighbours_unchanged() -> None:
    flat = torch.arange(4 * 70_000.0, device="cuda")
    before, one = flat.clone(), torch.ones(1, device="cuda")
    parts = flat.view(4, 70_000)[:, 1:60_002]
    run = choose("adamw", "cuda", torch.float32)
    run([adamw.ParameterState(*parts)], one, one, one, one[0], one[0] - 1, beta1=0.9, beta2=0.95, eps=1e-8)
    changed = (flat != before).view(4, 70_000)
    assert not changed[0].any() and changed[1:, 1:60_002].all() and int(changed.sum()) == 3 * 60_001


@pytest.mark.parametrize("single", [True, False])
def test_matches_torch_fused_adamw_without_synchronising(single: bool) -> None:
    held_by, norms = [], []
    for fused in (False, True):
        model = initialise(Transformer(MODEL, device="cuda"), 0)
        held = masters(model, DistributedContext.solo("cuda"), torch.bfloat16, single=single and fused)
        move = OptimizerStep(model, held, FusedAdamW(held, TRAIN) if fused else AdamW(held.local, TRAIN), TRAIN, SOLO)
        tokens = torch.arange(64, device="cuda")
        attend = Packed.of([64], "cuda")
        for i in range(4):
            if i == 2:
                torch.cuda.set_sync_debug_mode("error")
            try:
                held.begin_micro_batch(last=True)
                loss, _ = model(Stream(tokens + i, tokens), attend, Loss(tokens + i + 1))
                loss.backward()
                norms.append(move(i, loss.detach()).norm)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for name, p in model.named_parameters():
            assert torch.equal(p, held.local[name].bfloat16())
        held_by.append(held)
    assert abs(norms[4] / norms[0] - 1) < 1e-5
    for name, w in held_by[0].local.items():
        torch.testing.assert_close(held_by[1].local[name], w, rtol=2e-2, atol=2e-3)
