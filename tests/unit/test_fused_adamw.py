"""AdamW in one pass: the numbers, counts and checkpoints of AdamW in several."""

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
from tests.adamw import drawn, moved

MODEL = ModelConfig(vocab_size=61, layers=1, width=16, heads=4, ffn_width=17, context=32, tied=True)
TRAIN = TrainConfig(steps=9, warmup=0, lr=1e-2, min_lr=1e-3, weight_decay=0.3, clip=0.1)


def started(compute: torch.dtype, kept: torch.dtype, *, single: bool) -> tuple[Transformer, Masters]:
    model = initialise(Transformer(MODEL, dtype=kept), 0)
    return model, masters(model, DistributedContext.solo(), compute, single=single)


def backward(model: Transformer, held: Masters, i: int, scale: float = 1.0) -> Tensor:
    tokens = torch.arange(16) % 61
    held.begin_micro_batch(last=True)
    loss, _ = model(Stream((tokens + i) % 61, torch.arange(16)), Packed.of([16]), Loss((tokens + i + 1) % 61))
    (loss * scale).backward()
    return loss.detach()


def test_the_kernel_is_its_equation() -> None:
    """In one line a moment, by another way of writing than the reference's."""
    weights = drawn(torch.float32, torch.bfloat16)
    beta1, beta2, lr = 0.9, 0.95, 1e-2
    got = moved(reference.adamw, weights)
    for i, weight in enumerate(weights):
        g, w, m, v = (x.double() for x in weight[:4])
        g = g * 0.37
        for t in (100 * i + 1, 100 * i + 2):
            m, v = m.lerp(g, 1 - beta1), v.lerp(g.square(), 1 - beta2)
            w = w - lr * 0.1 * (i % 2) * w
            w = w - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
        mine, got = got[: 4 - (weight.copy is None)], got[4 - (weight.copy is None) :]
        for ours, exact in zip(mine, (w, m, v), strict=False):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
        assert weight.copy is None or torch.equal(mine[3], mine[0].bfloat16())


@pytest.mark.parametrize(("compute", "kept"), [("float64", "float64"), ("bfloat16", "float32"), ("float16", "float32")])
def test_it_moves_as_adamw_does(compute: str, kept: str) -> None:
    """Clipped, and with a step that is skipped; by gradients in the compute type."""
    low, high = getattr(torch, compute), getattr(torch, kept)
    runs = []
    for fused in (False, True):
        model, held = started(low, high, single=fused)
        optimizer = FusedAdamW(held, TRAIN) if fused else AdamW(held.local, TRAIN)
        move = OptimizerStep(model, held, optimizer, TRAIN, SOLO)
        losses, norms = [], []
        for i in range(4):
            losses.append(backward(model, held, i))
            if fused and low != high:
                assert all(p.grad is not None and p.grad.dtype == low for p in held.gradient_holders.values())
            before = {name: w.detach().clone() for name, w in held.local.items()}
            norms.append(move(i, losses[-1] * (torch.inf if i == 1 else 1)).norm)
            still = all(torch.equal(w, before[name]) for name, w in held.local.items())
            assert still == (i == 1)
            assert all(x.grad is None for x in (*held.local.values(), *model.parameters()))
        assert optimizer.steps == 3
        for name, p in model.named_parameters():
            assert torch.equal(p, held.local[name].to(low)), "the model computes with what was just written"
        runs.append((held, optimizer, losses, norms))
    (held, adamw, losses, norms), (mine, fused, my_losses, my_norms) = runs
    torch.testing.assert_close(my_losses, losses, rtol=1e-2 if low != high else 1e-12, atol=0)
    torch.testing.assert_close(my_norms[0], norms[0], rtol=1e-6 if low != high else 1e-13, atol=0)
    tolerance = {"rtol": 1e-2, "atol": 1e-4} if low != high else {"rtol": 1e-10, "atol": 1e-13}
    for name, w in held.local.items():
        torch.testing.assert_close(mine.local[name], w, **tolerance)
    assert list(fused.state) == list(adamw.state)


def test_the_norm_of_16_bit_gradients_is_taken_in_float32() -> None:
    model, held = started(torch.bfloat16, torch.float32, single=True)
    backward(model, held, 0)
    held.collect()
    found = optimizer_step.gradient_norm(held.gradient_holders, layout_of(model), SOLO_AXES, SOLO)
    exact = sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None) ** 0.5
    assert found.dtype == torch.float32
    assert abs(found.item() / exact.item() - 1) < 1e-6, "bfloat16 has three digits"  # type: ignore[union-attr]


def test_a_weight_without_a_gradient_stays_and_is_not_counted() -> None:
    weights = [(name, torch.nn.Parameter(torch.ones(3))) for name in ("a", "b")]
    held = UnshardedMasters(weights, torch.float32)
    optimizer = FusedAdamW(held, TRAIN)
    weights[1][1].grad = torch.ones(3)
    optimizer.step(0.1)
    assert weights[0][1].tolist() == [1, 1, 1] and weights[1][1].lt(1).all()
    assert [int(optimizer._state_of(w)["step"]) for _, w in weights] == [0, 1]
    optimizer.steps = 7
    assert optimizer._steps_P.tolist() == [7, 7]


def test_several_micro_batches_are_added_up_in_float32_or_not_at_all() -> None:
    _, held = started(torch.bfloat16, torch.float32, single=True)
    with pytest.raises(AssertionError, match="several micro-batches"):
        held.begin_micro_batch(last=False)


def test_moments_elsewhere_are_refused() -> None:
    with pytest.raises(ConfigError, match="fused_adamw"):
        TrainConfig(fused_adamw=True, offload="optimizer")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = "we the people of this union hold that a column stands in a row and bears its share"
    return corpora.small(tmp_path_factory.mktemp("data") / "corpus", text)


@pytest.mark.parametrize(("dtype", "micro_batch"), [("bfloat16", 4), ("bfloat16", 2), ("float16", 4)])
def test_a_run_resumes_bit_for_bit_and_from_the_other_optimizer(
    corpus: Path, tmp_path: Path, dtype: str, micro_batch: int
) -> None:
    model = MODEL.replace(vocab_size=300)
    t = TrainConfig(
        steps=6, batch=4, micro_batch=micro_batch, lr=1e-2, min_lr=1e-3, dtype=dtype, fused_adamw=True,  # type: ignore[arg-type]
        loss_scale=2.0**24, loss_scale_steps=2, log_every=1, eval_every=0, save_every=3,
    )  # fmt: skip
    data = DataConfig(path=corpus, sequence=16)
    whole = RunConfig(name="whole", runs=tmp_path, device="cpu", model=model, data=data, train=t)
    plain = whole.replace(name="plain", train=t.replace(fused_adamw=False))
    for run in (whole, plain):
        Trainer(run).fit()
    lines = [(run.folder / "metrics.jsonl").read_text().splitlines() for run in (whole, plain)]
    losses = [[json.loads(line)["loss"] for line in run] for run in lines]
    assert losses[0] == pytest.approx(losses[1], rel=3e-3) and losses[0][-1] < losses[0][0] - 0.05
    for source in (whole, plain):
        again = whole.replace(name=f"after-{source.name}")
        shutil.copytree(source.folder / "step-3", again.folder / "step-3")
        Trainer(again).fit()
        files = sorted((whole.folder / "step-6").glob("*.safetensors"))
        same = [path.read_bytes() == (again.folder / "step-6" / path.name).read_bytes() for path in files]
        assert files and (all(same) or source is plain)
        assert sorted(p.name for p in (again.folder / "step-6").iterdir()) == sorted(
            p.name for p in (plain.folder / "step-6").iterdir()
        )
