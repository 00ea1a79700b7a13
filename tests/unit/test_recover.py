"""Recovery of a quantised model: scales and norms train, values do not, and it never gets worse."""

import pytest
import torch

from colonnade import api
from colonnade.compress import Compression, compress
from colonnade.compress.recover import _dense, _integers, _Layer, _ScaledLinear, recover
from colonnade.config import MoeConfig
from colonnade.errors import ConfigError, DataError
from colonnade.kernels.linear.quantise import dequantise
from colonnade.model import Transformer, fused_block
from colonnade.model.tensor_parallel_linear import Linear
from colonnade.model.weight_only_quant import quantised_parameters, stored_quantised
from colonnade.parallel.distributed_context import DistributedContext
from tests.models import CONFIGS, build

TEXTS = [torch.randint(67, (n,), generator=torch.Generator().manual_seed(n)) for n in (60, 50, 40, 60)]
CONFIG = CONFIGS["llama_grouped_biased"].replace(init_std=0.2)


def models(config=CONFIG, **settings) -> tuple[Transformer, Transformer]:
    """(quantised, dense)."""
    model, teacher = (build(config, dtype=torch.float32).requires_grad_(False) for _ in range(2))
    compress(model, Compression(by="nearest", weight_group=32, **settings))
    return model, teacher


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"grid": "affine"},
        {"grid": "symmetric"},
        {"grid": "zero"},
        {"weights": "int8"},
        {"weights": "float8"},
    ],
    ids=lambda s: "-".join(s.values()),
)
def test_divergence_falls_and_values_stay(settings) -> None:
    model, teacher = models(**settings)
    old = {name: weight._replace(scales=weight.scales.clone()) for name, weight in quantised_parameters(model).items()}
    before, after = recover(model, teacher, TEXTS, 30, lr=2e-3 if "grid" in settings else 2e-4)
    assert after < before
    changed = 0
    for name, weight in quantised_parameters(model).items():
        assert torch.equal(weight.values.view(torch.uint8), old[name].values.view(torch.uint8)), name
        assert weight.scales.dtype == old[name].scales.dtype
        changed += not torch.equal(weight.scales, old[name].scales)
        if settings.get("grid") in ("symmetric", "zero") and name.startswith("blocks."):
            zero, was = (-w.scales.float()[..., 1] / w.scales.float()[..., 0] for w in (weight, old[name]))
            assert torch.equal(zero.round(), was.round())
    assert changed >= 2
    assert not any(p.requires_grad for p in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("settings", [{"weights": "int8"}, {"grid": "affine"}], ids=["int8", "int4"])
def test_a_model_that_was_served_recovers_too(settings) -> None:
    """An engine on a CPU stores weights in blocks of outputs."""
    config = CONFIG.replace(width=64, heads=4, head_width=16, kv_heads=2, ffn_width=96)
    (fresh, teacher), (served, _) = models(config, **settings), models(config, **settings)
    if fused_block.enable(served) != "native":
        pytest.skip("needs a C++ compiler")
    assert any(weight.blocked for weight in stored_quantised(served).values())
    before, after = recover(served, teacher, TEXTS, 10, lr=2e-4)
    assert before == pytest.approx(recover(fresh, teacher, TEXTS, 0)[0], rel=0.05)
    assert after < before


def test_it_is_never_worse() -> None:
    model, teacher = models()
    old = {name: weight.scales.clone() for name, weight in quantised_parameters(model).items()}
    norm = model.get_parameter("blocks.0.norm1.weight").clone()
    before, after = recover(model, teacher, TEXTS, 8, lr=10.0)
    assert before == after
    assert all(torch.equal(weight.scales, old[name]) for name, weight in quantised_parameters(model).items())
    assert torch.equal(model.get_parameter("blocks.0.norm1.weight"), norm)


@pytest.mark.parametrize("settings", [{"grid": "affine"}, {"weights": "int8"}], ids=["int4", "int8"])
def test_gradients_equal_autograd(settings) -> None:
    model, _ = models(**settings)
    layer = next(_Layer(module) for module in model.blocks.modules() if isinstance(module, Linear))
    weight, x = layer.weight, torch.randn(7, layer.weight.inputs, generator=torch.Generator().manual_seed(1))
    scale, low = (None if t is None else t.detach().requires_grad_() for t in layer._rounded())
    given = [t for t in (x.requires_grad_(), scale, low) if t is not None]
    out = _ScaledLinear.apply(x, scale, low, weight)
    torch.testing.assert_close(out, x @ dequantise(weight, torch.float32).T)
    random = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad((out * random).sum(), given)
    plain = x @ _dense(_integers(weight), scale, low, weight).T
    for a, b in zip(ours, torch.autograd.grad((plain * random).sum(), given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_experts_and_a_saved_result(tmp_path) -> None:
    config = CONFIGS["llama"].replace(vocab_size=67, moe=MoeConfig(experts=4, active=2, ffn_width=32))
    model, teacher = models(config)
    before, after = recover(model, teacher, TEXTS, 12, lr=2e-3)
    assert after < before
    solo = DistributedContext.solo(torch.device("cpu"))
    ours = api.Model(model, None, solo, "m")
    api.save(ours, tmp_path / "m")
    with api.load(tmp_path / "m", dtype="float32", device="cpu") as loaded:
        assert torch.equal(loaded.logits(TEXTS[0]), ours.logits(TEXTS[0]))


def test_refusals() -> None:
    model, teacher = models()
    with pytest.raises(DataError, match="was given 1"):
        recover(model, teacher, TEXTS[:1], 3)
    with pytest.raises(ConfigError, match="compress it first"):
        recover(teacher, teacher, TEXTS, 3)
