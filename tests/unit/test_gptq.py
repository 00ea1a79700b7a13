"""GPTQ, its grids, folding and calibration, on small matrices."""

import pytest
import torch

from colonnade.compress import Compression, compress
from colonnade.compress.calibrate import BlockRunner
from colonnade.compress.fold import apply, awq_scale, fold, smooth_scale
from colonnade.compress.gptq import damped, error, gptq, nearest
from colonnade.compress.grids import choose_grid
from colonnade.errors import ConfigError, DataError
from colonnade.kernels.cpu import kernels as cpu_kernels
from colonnade.kernels.linear import reference, skinny_gemm_cpu
from colonnade.kernels.linear.quantise import dequantise, quantise, unpack_int4
from colonnade.model import Packed, Rows, Stream, Transformer
from colonnade.model.weight_only_quant import quantised_kind, quantised_parameters
from tests.models import CONFIGS, MOES, build

GRIDS = ["affine", "zero", "symmetric"]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated_hessian(inputs: int, rows: int = 400) -> torch.Tensor:
    x = random(rows, 8, seed=1) @ random(8, inputs, seed=2) + 0.3 * random(rows, inputs, seed=3)
    x = x * torch.linspace(0.1, 3, inputs)
    return (x.T @ x).double() * (2 / rows)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("inputs", [64, 100])
def test_identity_hessian_is_nearest(grid, inputs):
    w = random(13, inputs)
    found = gptq(w, torch.eye(inputs), "int4", 32, grid)
    best = nearest(w, "int4", 32, grid, torch.ones(inputs))
    assert torch.equal(found.values, best.values)
    assert torch.equal(found.scales, best.scales)


@pytest.mark.parametrize("kind", ["int8", "float8", "int4", "int8_dynamic"])
def test_nearest_equals_the_quantiser_of_loading(kind):
    w = random(13, 100)
    ours, loading = nearest(w, kind, 32), quantise(w, kind, 32)
    assert torch.equal(ours.scales, loading.scales)
    if kind == "int4":  # words also pad the last group
        assert torch.equal(unpack_int4(ours), unpack_int4(loading))
    else:
        assert torch.equal(ours.values.view(torch.uint8), loading.values.view(torch.uint8))


@pytest.mark.parametrize("kind", ["int8", "float8", "int4", "int8_dynamic"])
def test_matrices_that_files_store_transposed_become_contiguous(kind):
    """GPT-2's: a CPU's kernels read rows."""
    w = random(96, 64).T
    for made in (quantise(w, kind, 32), nearest(w, kind, 32), gptq(w, correlated_hessian(96), kind, 32)):
        assert made.values.is_contiguous()
        assert made.scales.is_contiguous()
    assert torch.equal(
        dequantise(quantise(w, kind, 32), torch.float32), dequantise(quantise(w.contiguous(), kind, 32), torch.float32)
    )


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", ["int4", "int8", "float8"])
def test_gptq_is_never_worse_than_nearest(kind, grid):
    w, h = random(24, 96), correlated_hessian(96)
    errors = {
        name: error(dequantise(q, torch.float32) - w, damped(h))
        for name, q in (("gptq", gptq(w, h, kind, 32, grid)), ("nearest", nearest(w, kind, 32, grid)))
    }
    assert errors["gptq"] <= errors["nearest"]
    if kind == "int4":
        assert errors["gptq"] < 0.6 * errors["nearest"]


def test_gptq_equals_a_plain_loop():
    """Frantar's equation without blocks or permutations in place, in float64."""
    w, h = random(5, 40), correlated_hessian(40)
    grid = choose_grid(w, "int4", 32, "affine", damped(h).diagonal())
    order = damped(h).diagonal().argsort(descending=True)
    inverse = torch.linalg.inv(damped(h)[order][:, order])
    u = torch.linalg.cholesky(inverse, upper=True)
    left, q = w[:, order].double(), torch.empty(5, 40)
    for j, column in enumerate(order.tolist()):
        group = torch.tensor([column // 32])
        q[:, column] = grid.round(left[:, j : j + 1].float(), group)[:, 0]
        delta = (left[:, j] - grid.value(q[:, column : column + 1], group)[:, 0]) / u[j, j]
        left[:, j:] -= delta[:, None] * u[j, j:]
    assert torch.equal(unpack_int4(gptq(w, h, "int4", 32)), q.int())


@pytest.mark.parametrize("grid", ["zero", "symmetric"])
def test_integer_zero_points_are_exact(grid):
    q = nearest(random(7, 96), "int4", 32, grid)
    assert q.has_wide_scales == (grid == "zero")
    scale, low = q.scales.double().unbind(-1)
    zero = -low / scale
    assert torch.equal(zero, zero.round())
    assert zero.min() >= 0 and zero.max() <= 15
    integers = unpack_int4(q).double().unflatten(1, (-1, 32))
    exact = ((integers - zero[..., None]) * scale[..., None]).flatten(1)
    assert torch.equal(dequantise(q, torch.float64), exact)
    assert torch.equal(dequantise(q, torch.float32), exact.float())


def test_a_hessian_that_is_not_finite_is_refused():
    with pytest.raises(DataError, match=r"non-finite.*--by nearest"):
        gptq(random(4, 32), torch.full((32, 32), torch.nan), "int4", 32)
    assert gptq(random(4, 32), torch.zeros(32, 32), "int4", 32).inputs == 32  # an input never seen


def small(config, dtype=torch.float32) -> Transformer:
    return build(config, dtype=dtype).requires_grad_(False)


TEXTS = [torch.randint(67, (n,), generator=torch.Generator().manual_seed(n)) for n in (40, 33, 25)]


def logits(model: Transformer) -> torch.Tensor:
    tokens = TEXTS[1]
    return model(Stream(tokens, torch.arange(len(tokens))), Packed.of([len(tokens)]), Rows())


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3_window_tied"])
def test_folding_keeps_the_function(name):
    model = small(CONFIGS[name], torch.float64)
    before, changed = logits(model), 0
    runner = BlockRunner(model, TEXTS)
    block = model.blocks.get_submodule("0")
    statistics = runner.gather(0)
    old = {name: m.hessian.clone() for name, m in statistics.linears.items()}
    weights = {name: p.clone() for name, p in block.named_parameters()}
    fold(block, statistics, "int4", 32, "affine")
    changed = sum(not torch.equal(p, weights[name]) for name, p in block.named_parameters())
    assert changed >= 2
    torch.testing.assert_close(logits(model), before, rtol=1e-10, atol=1e-10)
    again = runner.gather(0)
    for key in old:  # what folding claims about the new inputs is true
        torch.testing.assert_close(again.linears[key].hessian, statistics.linears[key].hessian)


def test_awq_scale_lowers_the_error_and_smooth_scale_evens_maxima():
    model = small(CONFIGS["llama"], torch.float64)
    runner, block = BlockRunner(model, TEXTS), model.blocks.get_submodule("0")
    statistics = runner.gather(0)
    moments, w = statistics.linears["ffn.down"], block.ffn.down.weight.float()
    scale = awq_scale([w], moments, "int4", 32, "affine")
    if scale is not None:
        rounded = dequantise(nearest(w * scale, "int4", 32), torch.float32) / scale
        plain = dequantise(nearest(w, "int4", 32), torch.float32)
        h = damped(moments.hessian)
        assert error(rounded - w, h) < error(plain - w, h)
    smooth = smooth_scale([w], moments)
    before, after = (moments.max_D, moments.max_D / smooth)
    assert after.max() / after.min() < before.max() / before.min()
    apply([block.ffn.down], block.ffn.up, smooth)


def test_calibration_moments_equal_the_products_inputs():
    model = small(CONFIGS["llama"])
    runner, block = BlockRunner(model, TEXTS), model.blocks.get_submodule("0")
    statistics = runner.gather(0)
    x = torch.cat([block.norm1(hidden) for hidden in runner.hidden]).double()
    moments = statistics.linears["attention.qkv"]
    torch.testing.assert_close(moments.hessian, x.T @ x * (2 / len(x)))
    torch.testing.assert_close(moments.mean_abs, x.abs().mean(0))
    assert "forward" not in vars(block.attention.qkv)  # the hooks are gone


@pytest.mark.parametrize("name", ["gated", "biased_shared", "capacity"])
def test_experts_have_hessians_of_their_own(name):
    model = small(MOES[name])
    runner = BlockRunner(model, TEXTS)
    runner.advance(0)
    statistics = runner.gather(1)
    (experts,) = statistics.experts.values()
    rows = [moments.rows for moments in experts["up"]]
    active = MOES[name].moe.active
    assert sum(rows) <= active * sum(map(len, TEXTS))
    assert sum(rows) > 0.5 * active * sum(map(len, TEXTS))
    assert rows == [moments.rows for moments in experts["down"]]
    for hessian in statistics.expert_hessians("ffn.experts", "down"):
        torch.linalg.cholesky(damped(hessian))


def test_int8_dynamic_rounds_inputs_in_groups() -> None:
    weight, x = nearest(random(9, 70), "int8_dynamic", 64), random(5, 70, seed=4)
    expected = torch.zeros(5, 9)
    for token in range(5):
        for start in range(0, 70, 32):
            part = x[token, start : start + 32]
            scale = part.abs().max() / 127
            q = (part / scale).round()
            expected[token] += (weight.values[:, start : start + 32].float() @ q) * scale * weight.scales[:, 0]
    for rows in (slice(0, 1), slice(0, 5)):
        for run in (reference.quantised_linear, skinny_gemm_cpu.quantised_linear, cpu_kernels.quantised_linear):
            torch.testing.assert_close(run(x[rows], weight), expected[rows], rtol=1e-4, atol=1e-4)
    many = x.repeat(20, 1)
    torch.testing.assert_close(skinny_gemm_cpu.quantised_linear(many, weight), expected.repeat(20, 1))
    plain = reference.quantised_linear(x, weight._replace(kind="int8"))
    assert (plain - expected).abs().max() > 1e-3


@pytest.mark.parametrize("by", ["gptq", "fold"])
@pytest.mark.parametrize("kind", ["int4", "int8_dynamic"])
def test_folded_scales_are_used(kind, by) -> None:
    folded, plain = small(CONFIGS["llama"]), small(CONFIGS["llama"])
    compress(folded, Compression(weights=kind, weight_group=32, by=by), TEXTS)
    compress(plain, Compression(weights=kind, weight_group=32, by="nearest" if by == "fold" else by, fold=False), TEXTS)
    assert not torch.equal(folded.get_parameter("blocks.0.norm2.weight"), plain.get_parameter("blocks.0.norm2.weight"))


def test_folding_alone_rounds_the_folded_weights_to_nearest() -> None:
    """AWQ as published: the first block, folded by hand."""
    model, by_hand = small(CONFIGS["llama"]), small(CONFIGS["llama"])
    compress(model, Compression(weight_group=32, by="fold"), TEXTS)
    runner, block = BlockRunner(by_hand, TEXTS), by_hand.blocks.get_submodule("0")
    statistics = runner.gather(0)
    fold(block, statistics, "int4", 32, "affine")
    for part in ("attention.qkv", "ffn.up", "ffn.gate", "ffn.down"):
        expected = nearest(block.get_submodule(part).weight, "int4", 32)
        found = quantised_parameters(model)[f"blocks.0.{part}.weight"]
        assert torch.equal(found.values, expected.values), part
        assert torch.equal(found.scales, expected.scales), part


def test_block_after_block_equals_the_whole_model():
    for config in (CONFIGS["llama"], MOES["gated"]):
        model = small(config)
        runner = BlockRunner(model, TEXTS)
        for layer in range(config.layers):
            runner.advance(layer)
        out = runner.hidden[1] @ model.output.weight_vD.T
        torch.testing.assert_close(out, logits(model))


def test_compress_quantises_every_matrix():
    for config in (CONFIGS["llama"], CONFIGS["qwen3_window_tied"], CONFIGS["latent"], MOES["biased_shared"]):
        for by in ("gptq", "nearest"):
            model = small(config)
            reference = logits(model)
            compress(model, Compression(weights="int8", by=by), TEXTS)
            assert quantised_kind(model) == "int8"
            assert all(".kv_up." not in name for name in quantised_parameters(model))
            difference = (logits(model) - reference).norm() / reference.norm()
            assert 0 < difference < 0.05, (config.family, by, difference)


def first_outputs(model: Transformer) -> list[torch.Tensor]:
    """The first block's outputs for all texts."""
    runner = BlockRunner(model, TEXTS)
    runner.advance(0)
    return runner.hidden


def test_calibration_helps_on_its_own_texts():
    """The first block's outputs, in int4: GPTQ after nearest."""
    errors = {}
    for by in ("nearest", "gptq"):
        model = small(CONFIGS["llama"])
        reference = first_outputs(model)
        compress(model, Compression(weights="int4", by=by, weight_group=32), TEXTS)
        outputs = first_outputs(model)
        errors[by] = sum(float((a - b).norm()) for a, b in zip(outputs, reference, strict=True))
    assert errors["gptq"] < errors["nearest"]


def test_refusals():
    model = small(CONFIGS["llama"])
    with pytest.raises(DataError, match=r"have 5 tokens, and a matrix of 48 inputs needs at least 48"):
        compress(model, Compression(), [TEXTS[0][:5]])
    with pytest.raises(ConfigError, match=r"no rule for folding scales for int8.*gptq or nearest"):
        compress(model, Compression(weights="int8", by="fold"), TEXTS)
    compress(model, Compression(by="nearest"))
    with pytest.raises(ConfigError, match="already in int4"):
        compress(model, Compression(by="nearest"))
