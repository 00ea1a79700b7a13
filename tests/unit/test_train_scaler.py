"""The loss scale: its rule, and that an overflowed step changes nothing."""

import pytest
import torch

from colonnade.config import ModelConfig, TrainConfig
from colonnade.errors import ConfigError
from colonnade.model import Transformer, initialise
from colonnade.parallel.axis import SOLO
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters
from colonnade.train.loss_scaler import MAX_SCALE, LossScaler
from colonnade.train.lr_schedule import learning_rate
from colonnade.train.optimizer import AdamW
from colonnade.train.train_step import TrainStep
from tests.parity.train_cases import ragged

CPU = torch.device("cpu")
MODEL = ModelConfig(vocab_size=61, layers=2, width=16, heads=4, ffn_width=17, context=32, tied=True)


def scaler(scale: float, every: int) -> LossScaler:
    return LossScaler(TrainConfig(dtype="float16", loss_scale=scale, loss_scale_steps=every), CPU)


def test_scale_update_rule() -> None:
    it = scaler(8.0, 3)
    seen = []
    for norm in (1.0, 1.0, torch.inf, 1.0, 1.0, 1.0, torch.nan, 1.0, 1.0, 1.0, 1.0):
        unscaled = it.update(torch.tensor(norm * 8))
        seen.append((it.used_scale.item(), float(it.good_steps.item() == 0 and it.scale < it.used_scale)))
        assert not torch.isfinite(unscaled) or unscaled.item() == norm * 8 / it.used_scale.item()
    assert [used for used, _ in seen] == [8, 8, 8, 4, 4, 4, 8, 4, 4, 4, 8]
    assert [bool(over) for _, over in seen] == [i in (2, 6) for i in range(11)]
    assert it.skipped.item() == 2
    assert it.state == (8.0, 1)
    again = scaler(2.0, 3)
    again.restore(it.state, 2)
    assert (again.state, again.skipped.item()) == (it.state, 2)


def test_scale_without_overflow_stays_finite() -> None:
    it = scaler(MAX_SCALE, 1)
    it.update(torch.tensor(0.0))
    assert it.scale.item() == MAX_SCALE


def test_scale_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss_scale 1000.0 is not a power of two, so it would be rounded; use 1024"):
        TrainConfig(loss_scale=1000)
    with pytest.raises(ConfigError, match=r"loss_scale is inf"):
        TrainConfig(loss_scale=float("inf"))


class Training:
    """A tiny model in float16."""

    def __init__(self, scale: float, every: int = 2000):
        self.train = TrainConfig(steps=40, warmup=2, lr=1e-2, dtype="float16", loss_scale=scale, loss_scale_steps=every)
        self.model = initialise(Transformer(MODEL), 0)
        self.masters = masters(self.model, DistributedContext.solo(), torch.float16)
        self.optimizer = AdamW(self.masters.local, self.train)
        self.scaler = LossScaler(self.train, CPU)
        self.step = TrainStep(self.model, self.masters, self.optimizer, self.train, SOLO, scaler=self.scaler)

    def all(self) -> dict[str, torch.Tensor]:
        weights = {name: w.detach() for name, w in self.masters.local.items()}
        computed = {f"{name}, rounded": p.detach() for name, p in self.model.named_parameters()}
        return {name: w.clone() for name, w in (weights | computed | self.optimizer.state).items()}


def test_overflow_skips_the_step_and_recovers() -> None:
    it = Training(scale=2.0**28)
    counts, scales, losses, rates = [], [], [], []
    for i in range(24):
        before = it.all()
        out = it.step(i, [ragged(i % 3, it.model.config), ragged(i % 3 + 50, it.model.config)])
        assert out.skipped is not None and out.loss_scale is not None
        counts.append(int(out.skipped))
        rates.append(float(out.lr))
        scales.append(float(out.loss_scale))
        losses.append(float(out.loss_sum / out.count))
        moved = [name for name, now in it.all().items() if not torch.equal(now, before[name])]
        assert bool(moved) == bool(out.norm.isfinite()), "a skipped step changes no weight, any other changes some"
    assert counts[:4] == [1, 2, 3, 4] and counts[12:] == counts[12:13] * 12, "the scale must be too high at first only"
    assert scales == [2.0 ** (28 - skipped) for skipped in (0, *counts[:-1])]
    assert it.optimizer.steps == 24 - counts[-1]
    updates = [i - skipped for i, skipped in enumerate((0, *counts[:-1]))]
    assert updates[:6] != list(range(6))
    assert rates == [learning_rate(i, it.train) for i in updates], "a skipped step does not advance the schedule"
    assert losses[-1] < losses[0] - 0.2


def test_scale_does_not_change_the_gradients() -> None:
    """Scaling by a power of two is exact without underflow: gradients, norm and step are the same for any scale."""
    runs = [Training(scale=scale) for scale in (2.0**10, 2.0**11)]
    outs = [it.step(0, [ragged(1, it.model.config)]) for it in runs]
    torch.testing.assert_close(outs[0].norm, outs[1].norm, rtol=1e-4, atol=0)
    for one, other in zip(*(it.masters.local.values() for it in runs), strict=True):
        assert (one - other).norm() <= 1e-3 * one.norm()
