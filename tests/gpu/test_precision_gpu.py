"""Float8 equals its reference; no precision or memory option makes a step synchronise with the device."""

import pytest
import torch

from colonnade.config import RunConfig, TrainConfig
from colonnade.kernels.linear import float8
from colonnade.kernels.registry import choose
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.activation_memory import saved_for_backward_bytes
from colonnade.train.loss_scaler import LossScaler
from colonnade.train.optimizer import AdamW, OffloadedAdamW
from colonnade.train.run_log import RunLog
from colonnade.train.train_step import forward
from colonnade.train.training_state import TrainingState
from tests.gpu.test_train_gpu import config  # noqa: F401  (a fixture)

# torch.compile, which the loss uses on a GPU, emits warnings of its own.
pytestmark = pytest.mark.filterwarnings("ignore")

hopper = pytest.mark.skipif(torch.cuda.get_device_capability() < (9, 0), reason="no float8 tensor cores")


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


@hopper
@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("T", [1, 33, 512, 4096])
@pytest.mark.parametrize("compiled", [False, True])
def test_float8_linear_equals_reference(row_wise: bool, T: int, compiled: bool, monkeypatch) -> None:
    """The same float8 operands, so only summation order differs; tolerances as for bfloat16 kernels."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, w, dy = (
        torch.randn(shape, device="cuda", generator=generator).bfloat16()
        for shape in ((T, 1024), (768, 1024), (T, 768))
    )
    results = []
    for kernels in ("auto", "reference"):
        monkeypatch.setattr(float8, "choose", lambda op, device, dtype, k=kernels: choose(op, device, dtype, k))
        torch._dynamo.reset()
        linear = torch.compile(float8.linear, fullgraph=True) if compiled and kernels == "auto" else float8.linear
        leaves = [a.clone().requires_grad_() for a in (x, w)]
        y = linear(*leaves, row_wise=row_wise)
        y.backward(dy)
        results.append((y.detach(), *(leaf.grad for leaf in leaves)))
    for got, expected in zip(*results, strict=True):
        assert error(got, expected) < 4e-3
    for got, exact in zip(results[0], (x @ w.T, dy @ w, dy.T @ x), strict=True):
        assert error(got, exact) < 0.1


OPTIONS = {
    "float16": {"dtype": "float16", "loss_scale": 2.0**40},
    "float16 offloaded": {"dtype": "float16", "offload": "optimizer"},
    "offloaded": {"offload": "optimizer"},
    "full": {"recompute": "full"},
    "attention, compiled": {"recompute": "attention", "compile": True},
    "budget": {"recompute": "budget", "activation_bytes": 2_000_000},
    "float8": {"float8": "rowwise", "compile": True},
    "float8 tensorwise, full": {"float8": "tensorwise", "recompute": "full"},
}


@hopper
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_do_not_synchronise(config: RunConfig, name: str) -> None:  # noqa: F811
    # Equal lengths when compiled, because new lengths would trigger recompilation, which is not tested here.
    data, t = (
        config.data.replace(separate_documents="compile" not in OPTIONS[name]),
        config.train.replace(**OPTIONS[name]),
    )
    config = config.replace(data=data, train=t)
    with DistributedContext.build(config.plan, config.device) as context:
        training = TrainingState(config, context)
        with RunLog(training) as log:
            log.record(training.step())
            log.record(training.step())
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(4):
                    log.record(training.step())
            finally:
                torch.cuda.set_sync_debug_mode("default")
            log.report()


def test_offloaded_optimizer_equals_resident_bitwise() -> None:
    """Several buckets of unequal sizes, so that every staging buffer is reused; one step is skipped."""
    shapes = [(300, 70), (5,), (64, 64), (1000, 33), (0, 3), (7, 7), (900, 50)]
    generator = torch.Generator("cuda").manual_seed(0)
    start = [torch.randn(shape, device="cuda", generator=generator) for shape in shapes]
    grads = [[torch.randn(shape, device="cuda", generator=generator) for shape in shapes] for _ in range(6)]
    t = TrainConfig(dtype="float16", loss_scale=4.0)
    runs = []
    for make in (AdamW, lambda w, t: OffloadedAdamW(w, t, bucket_bytes=1 << 15)):
        weights = {str(i): w.clone() for i, w in enumerate(start)}
        optimizer, scaler = make(weights, t), LossScaler(t, torch.device("cuda"))
        for number, step in enumerate(grads):
            for w, grad in zip(weights.values(), step, strict=True):
                w.grad = grad * scaler.scale
            scaler.update(torch.tensor(torch.inf if number == 2 else 1.0, device="cuda"))
            skip = torch.tensor(float(number == 2), device="cuda")
            optimizer.step(1e-2, skip, scaler.used_scale)
        runs.append((weights, optimizer.state, optimizer.steps))
    (weights, state, steps), (offloaded_weights, offloaded_state, offloaded_steps) = runs
    assert steps == offloaded_steps == 5
    assert all(
        moment.device.type == "cpu" and (moment.is_pinned() or not moment.numel())
        for moment in offloaded_state.values()
    )
    for name, w in weights.items():
        assert torch.equal(w, offloaded_weights[name])
    for key, moment in state.items():
        assert torch.equal(moment.cpu(), offloaded_state[key]), key


@pytest.mark.parametrize("compiled", [False, True])
def test_activation_budget_is_respected(config: RunConfig, compiled: bool) -> None:  # noqa: F811
    """The blocks' saved activations stay within the budget, plus what all blocks share."""
    t = config.train.replace(recompute="budget", activation_bytes=1_500_000, compile=compiled)
    config = config.replace(model=config.model.replace(layers=6), train=t)
    with DistributedContext.build(config.plan, config.device) as context:
        training = TrainingState(config, context)
        assert training.recompute_summary is not None and "full" in training.recompute_summary
        batch = training.feed.samples.at(0)[0].to("cuda")
        saved = saved_for_backward_bytes(training.model, lambda: forward(training.model, batch))
        weight = config.model.vocab_size * config.model.width * 4
        assert saved < 1_500_000 + 2 * weight
