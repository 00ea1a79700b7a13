"""The learning-rate schedule, AdamW, gradient norm and master weights, against their equations."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colonnade.config import ModelConfig, TrainConfig
from colonnade.model import Loss, Packed, Stream, Transformer, initialise
from colonnade.parallel.axis import SOLO, SOLO_AXES
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import UnshardedMasters, masters
from colonnade.parallel.layout import PARTIAL, WHOLE, Placement
from colonnade.train import optimizer_step
from colonnade.train.lr_schedule import learning_rate
from colonnade.train.optimizer import AdamW


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_schedule_end_points(kind: str) -> None:
    train = TrainConfig(steps=101, warmup=10, lr=1e-3, min_lr=1e-5, schedule=kind)  # type: ignore[arg-type]
    assert 0 < learning_rate(0, train) < learning_rate(9, train) < learning_rate(10, train)
    assert learning_rate(10, train) == pytest.approx(1e-3)
    last = 1e-3 if kind == "constant" else 1e-5
    assert learning_rate(100, train) == learning_rate(5000, train) == pytest.approx(last)
    middle = {"cosine": (1e-3 + 1e-5) / 2, "linear": (1e-3 + 1e-5) / 2, "constant": 1e-3}[kind]
    assert learning_rate(55, train) == pytest.approx(middle)


@given(
    steps=st.integers(1, 500), warmup=st.integers(0, 500), step=st.integers(0, 600),
    kind=st.sampled_from(["cosine", "linear", "constant"]),
)  # fmt: skip
def test_schedule_stays_between_its_end_points(steps: int, warmup: int, step: int, kind: str) -> None:
    train = TrainConfig(steps=steps, warmup=min(warmup, steps), lr=1e-3, min_lr=1e-4, schedule=kind)  # type: ignore[arg-type]
    rate = learning_rate(step, train)
    assert 0 < rate <= 1e-3 * (1 + 1e-12)
    if step >= train.warmup:
        assert rate >= 1e-4 * (1 - 1e-12)
        assert learning_rate(step + 1, train) <= rate * (1 + 1e-12)


def reference_adamw(w: Tensor, grads: list[Tensor], lr: float, decay: float, train: TrainConfig) -> Tensor:
    """The module's equation, step by step."""
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m = train.beta1 * m + (1 - train.beta1) * g
        v = train.beta2 * v + (1 - train.beta2) * g**2
        w = w * (1 - lr * decay)
        w = w - lr * (m / (1 - train.beta1**t)) / ((v / (1 - train.beta2**t)).sqrt() + train.eps)
    return w


def test_adamw_matches_its_equation_and_skips_decay_of_vectors() -> None:
    torch.manual_seed(0)
    train = TrainConfig(weight_decay=0.3)
    shapes = {"matrix": (3, 4), "vector": (5,), "empty": (0, 4)}
    weights = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    start = {name: w.clone() for name, w in weights.items()}
    grads = [{name: torch.randn_like(w) for name, w in weights.items()} for _ in range(4)]
    optimizer = AdamW(weights, train)
    for step in grads:
        for name, w in weights.items():
            w.grad = step[name].clone()
        optimizer.step(0.01)
        assert all(w.grad is None for w in weights.values())
    for name, decay in (("matrix", 0.3), ("vector", 0.0)):
        expected = reference_adamw(start[name], [step[name] for step in grads], 0.01, decay, train)
        torch.testing.assert_close(weights[name], expected, rtol=1e-12, atol=1e-12)
    assert optimizer.steps == 4


def test_gradient_norm_and_clipping() -> None:
    layout: dict[str, Placement] = {"a": 0, "b": WHOLE, "c": PARTIAL, "none": 1}
    weights = {name: torch.zeros(3, dtype=torch.float64) for name in layout}
    for name, value in (("a", 1.0), ("b", 2.0), ("c", -2.0)):
        weights[name].grad = torch.full((3,), value, dtype=torch.float64)
    optimizer_step.sum_partial_grads(weights, layout, SOLO)
    norm = optimizer_step.gradient_norm(weights, layout, SOLO_AXES, SOLO)
    assert norm.item() == pytest.approx(math.sqrt(27))
    optimizer_step.clip_grads_(weights, norm, float("inf"))
    assert weights["b"].grad is not None
    assert weights["b"].grad[0].item() == 2.0
    optimizer_step.clip_grads_(weights, norm, 1.0)
    assert optimizer_step.gradient_norm(weights, layout, SOLO_AXES, SOLO).item() == pytest.approx(1.0, rel=1e-6)
    optimizer_step.clip_grads_(weights, torch.tensor(0.5), 1.0)
    assert optimizer_step.gradient_norm(weights, layout, SOLO_AXES, SOLO).item() == pytest.approx(1.0, rel=1e-6), (
        "gradients must never be scaled up"
    )


def test_low_precision_gradients_accumulate_in_float32() -> None:
    """Sixteen micro-batches in bfloat16: gradients are summed in float32, which bfloat16 could not represent."""
    config = ModelConfig(vocab_size=61, layers=1, width=16, heads=4, ffn_width=17, context=32, tied=True)
    model = initialise(Transformer(config), 0)
    store = masters(model, DistributedContext.solo(), torch.bfloat16)
    tokens = torch.arange(16) % 61
    expected: dict[str, Tensor] = {}
    for i in range(16):
        store.begin_micro_batch(last=i == 15)
        loss, _ = model(Stream((tokens + i) % 61, torch.arange(16)), Packed.of([16]), Loss((tokens + i + 1) % 61))
        loss.backward()
        for name, master in store.local.items():
            assert master.grad is not None
            assert master.grad.dtype == torch.float32
            if i == 0:
                expected[name] = master.grad.clone()
    store.collect()
    assert all(p.grad is None and p.dtype == torch.bfloat16 for p in model.parameters())
    once = {name: grad.bfloat16().float() for name, grad in expected.items()}
    assert all(torch.equal(once[name], grad) for name, grad in expected.items()), "one micro-batch is bfloat16"
    total = store.local["embed.tokens.weight"].grad
    assert total is not None
    assert not torch.equal(total.bfloat16().float(), total), "the sum is finer than bfloat16"
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    AdamW(store.local, TrainConfig()).step(1e-1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    store.update_model()
    for name, p in model.named_parameters():
        assert torch.equal(p, store.local[name].bfloat16())
        assert not torch.equal(p, before[name])


def test_transposed_gradients_update_the_right_weights():
    """torch's fused AdamW reads memory in order, but its zero-bubble schedule leaves transposed views as gradients."""
    moved = []
    for lay in (torch.Tensor.contiguous, lambda g: g.T.contiguous().T):
        weight = torch.nn.Parameter(torch.zeros(3, 4))
        store = UnshardedMasters([("w", weight)], torch.float32)
        optimizer = AdamW(store.local, TrainConfig(steps=1, weight_decay=0.0))
        weight.grad = lay(torch.arange(12.0).view(3, 4) - 6)
        store.collect()
        optimizer.step(1e-3)
        moved.append(weight.detach().clone())
    assert torch.equal(*moved)
