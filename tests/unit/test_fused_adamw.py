"""Fused AdamW: the same weights, step counts and checkpoints as AdamW."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from colonnade.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from colonnade.errors import ConfigError
from colonnade.kernels import adamw as reference
from colonnade.model import Loss, Packed, Stream, Transformer, initialise
from colonnade.parallel.axis import SOLO, SOLO_AXES
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters, UnshardedMasters, masters
from colonnade.parallel.layout import layout_of
from colonnade.train import Trainer, optimizer_step
from colonnade.train.optimizer import AdamW, FusedAdamW
from colonnade.train.optimizer_step import OptimizerStep
from tests import corpora
from tests.adamw import random_states, two_steps

MODEL = ModelConfig(vocab_size=61, layers=1, width=16, heads=4, ffn_width=17, context=32, tied=True)
TRAIN = TrainConfig(steps=9, warmup=0, lr=1e-2, min_lr=1e-3, weight_decay=0.3, clip=0.1)


def make_model(compute: torch.dtype, master: torch.dtype, *, single: bool) -> tuple[Transformer, Masters]:
    model = initialise(Transformer(MODEL, dtype=master), 0)
    return model, masters(model, DistributedContext.solo(), compute, single=single)


def backward(model: Transformer, master_weights: Masters, i: int, scale: float = 1.0) -> Tensor:
    tokens = torch.arange(16) % 61
    master_weights.begin_micro_batch(last=True)
    loss, _ = model(Stream((tokens + i) % 61, torch.arange(16)), Packed.of([16]), Loss((tokens + i + 1) % 61))
    (loss * scale).backward()
    return loss.detach()


def test_reference_follows_the_equations() -> None:
    """The update equations, written differently from the reference."""
    weights = random_states(torch.float32, torch.bfloat16)
    beta1, beta2, lr = 0.9, 0.95, 1e-2
    got = two_steps(reference.adamw, weights)
    for i, weight in enumerate(weights):
        g, w, m, v = (x.double() for x in weight[:4])
        g = g * 0.37
        for t in (100 * i + 1, 100 * i + 2):
            m, v = m.lerp(g, 1 - beta1), v.lerp(g.square(), 1 - beta2)
            w = w - lr * 0.1 * (i % 2) * w
            w = w - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
        actual, got = got[: 4 - (weight.copy is None)], got[4 - (weight.copy is None) :]
        for ours, exact in zip(actual, (w, m, v), strict=False):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
        assert weight.copy is None or torch.equal(actual[3], actual[0].bfloat16())


@pytest.mark.parametrize(
    ("compute", "master"), [("float64", "float64"), ("bfloat16", "float32"), ("float16", "float32")]
)
def test_fused_adamw_equals_adamw(compute: str, master: str) -> None:
    """With clipping, a skipped step, and gradients in the compute dtype."""
    low, high = getattr(torch, compute), getattr(torch, master)
    runs = []
    for fused in (False, True):
        model, master_weights = make_model(low, high, single=fused)
        optimizer = FusedAdamW(master_weights, TRAIN) if fused else AdamW(master_weights.local, TRAIN)
        step = OptimizerStep(model, master_weights, optimizer, TRAIN, SOLO)
        losses, norms = [], []
        for i in range(4):
            losses.append(backward(model, master_weights, i))
            if fused and low != high:
                assert all(p.grad is not None and p.grad.dtype == low for p in master_weights.gradient_holders.values())
            before = {name: w.detach().clone() for name, w in master_weights.local.items()}
            norms.append(step(i, losses[-1] * (torch.inf if i == 1 else 1)).norm)
            unchanged = all(torch.equal(w, before[name]) for name, w in master_weights.local.items())
            assert unchanged == (i == 1)
            assert all(x.grad is None for x in (*master_weights.local.values(), *model.parameters()))
        assert optimizer.steps == 3
        for name, p in model.named_parameters():
            assert torch.equal(p, master_weights.local[name].to(low)), "the model uses the new weights"
        runs.append((master_weights, optimizer, losses, norms))
    (master_weights, adamw, losses, norms), (fused_masters, fused, fused_losses, fused_norms) = runs
    torch.testing.assert_close(fused_losses, losses, rtol=1e-2 if low != high else 1e-12, atol=0)
    torch.testing.assert_close(fused_norms[0], norms[0], rtol=1e-6 if low != high else 1e-13, atol=0)
    tolerance = {"rtol": 1e-2, "atol": 1e-4} if low != high else {"rtol": 1e-10, "atol": 1e-13}
    for name, w in master_weights.local.items():
        torch.testing.assert_close(fused_masters.local[name], w, **tolerance)
    assert list(fused.state) == list(adamw.state)


def test_the_norm_of_16_bit_gradients_is_taken_in_float32() -> None:
    model, master_weights = make_model(torch.bfloat16, torch.float32, single=True)
    backward(model, master_weights, 0)
    master_weights.collect()
    norm = optimizer_step.gradient_norm(master_weights.gradient_holders, layout_of(model), SOLO_AXES, SOLO)
    exact = sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None) ** 0.5
    assert norm.dtype == torch.float32
    assert abs(norm.item() / exact.item() - 1) < 1e-6, "bfloat16 has three digits"  # type: ignore[union-attr]


def test_a_weight_without_a_gradient_is_not_updated_or_counted() -> None:
    weights = [(name, torch.nn.Parameter(torch.ones(3))) for name in ("a", "b")]
    master_weights = UnshardedMasters(weights, torch.float32)
    optimizer = FusedAdamW(master_weights, TRAIN)
    weights[1][1].grad = torch.ones(3)
    optimizer.step(0.1)
    assert weights[0][1].tolist() == [1, 1, 1] and weights[1][1].lt(1).all()
    assert [int(optimizer._state_of(w)["step"]) for _, w in weights] == [0, 1]
    optimizer.steps = 7
    assert optimizer._steps_P.tolist() == [7, 7]


def test_accumulating_micro_batches_in_16_bits_is_refused() -> None:
    _, master_weights = make_model(torch.bfloat16, torch.float32, single=True)
    with pytest.raises(AssertionError, match="several micro-batches"):
        master_weights.begin_micro_batch(last=False)


def test_offloaded_moments_are_refused() -> None:
    with pytest.raises(ConfigError, match="fused_adamw"):
        TrainConfig(fused_adamw=True, offload="optimizer")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = "we the people of this union hold that a column stands in a row and bears its share"
    return corpora.small(tmp_path_factory.mktemp("data") / "corpus", text)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "micro_batch"), [("bfloat16", 4), ("bfloat16", 2), ("float16", 4)])
def test_a_run_resumes_bitwise_and_from_the_other_optimizer(
    corpus: Path, tmp_path: Path, dtype: str, micro_batch: int
) -> None:
    model = MODEL.replace(vocab_size=300)
    t = TrainConfig(
        steps=6, batch=4, micro_batch=micro_batch, lr=1e-2, min_lr=1e-3, dtype=dtype, fused_adamw=True,  # type: ignore[arg-type]
        loss_scale=2.0**24, loss_scale_steps=2, log_every=1, eval_every=0, save_every=3,
    )  # fmt: skip
    data = DataConfig(path=corpus, sequence=16)
    fused_run = RunConfig(name="whole", runs=tmp_path, device="cpu", model=model, data=data, train=t)
    plain_run = fused_run.replace(name="plain", train=t.replace(fused_adamw=False))
    for run in (fused_run, plain_run):
        Trainer(run).fit()
    lines = [(run.folder / "metrics.jsonl").read_text().splitlines() for run in (fused_run, plain_run)]
    losses = [[json.loads(line)["loss"] for line in run] for run in lines]
    assert losses[0] == pytest.approx(losses[1], rel=3e-3) and losses[0][-1] < losses[0][0] - 0.05
    for source in (fused_run, plain_run):
        again = fused_run.replace(name=f"after-{source.name}")
        shutil.copytree(source.folder / "step-3", again.folder / "step-3")
        Trainer(again).fit()
        files = sorted((fused_run.folder / "step-6").glob("*.safetensors"))
        same = [path.read_bytes() == (again.folder / "step-6" / path.name).read_bytes() for path in files]
        assert files and (all(same) or source is plain_run)
        assert sorted(p.name for p in (again.folder / "step-6").iterdir()) == sorted(
            p.name for p in (plain_run.folder / "step-6").iterdir()
        )
