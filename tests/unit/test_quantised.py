"""Quantised weights: rounding error, storage, and loading, scoring and generating with them."""

import math
from pathlib import Path

import pytest
import torch

from colonnade import api
from colonnade.checkpoint.hf.write import write_hf
from colonnade.config import MoeConfig, ServeConfig
from colonnade.config.feature_checks import check_quantised
from colonnade.config.presets import preset
from colonnade.errors import CheckpointError, ConfigError, PlanError
from colonnade.kernels.linear import reference, skinny_gemm_cpu
from colonnade.kernels.linear.quantise import dequantise, quantise, to_float
from colonnade.kernels.registry import KERNELS
from colonnade.model.tensor_parallel_linear import Linear, QuantisableMatrix
from colonnade.model.weight_only_quant import quantised_kind, weight_bytes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine
from tests.models import BERTS, CONFIGS, build
from tests.serve import tiny

KINDS = [("int8", 64), ("int4", 32), ("int4", 64), ("int4", 128), ("float8", 64)]


def random_weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("inputs", [32, 300, 1])
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_rounding_error_of_weights_is_bounded(kind: str, group: int, inputs: int, scale: float) -> None:
    w = (random_weights(40, inputs) + 0.3) * scale
    w[3], w[4, 1:] = 0, 0  # a row of zeros; one number alone
    got = dequantise(quantise(w, kind, group), torch.float32)
    assert got.shape == w.shape and not got[3].any()
    highest = w.abs().amax(1, keepdim=True)
    if kind == "int8":
        bound = highest / 127 * 0.5001
    elif kind == "int4":
        padded = torch.nn.functional.pad(w, (0, -inputs % group)).unflatten(1, (-1, group))
        span = padded.amax(2).clamp(min=0) - padded.amin(2).clamp(max=0)
        bound = (span / 15 * 0.6).repeat_interleave(group, 1)[:, :inputs]
    else:  # half a unit in the last of 4 bits, up to the end of the format
        bound = (w.abs() / 16).maximum(highest * 2.0**-17)
    assert ((got - w).abs() <= bound * 1.001).all()
    assert ((got - w).abs() > bound / 10).any() or inputs == 1


@pytest.mark.parametrize(("kind", "share"), [("int8", 1 / 4), ("float8", 1 / 4), ("int4", 4.5 / 32)])
def test_stored_bytes_follow_the_bit_width(kind: str, share: float) -> None:
    w = random_weights(64, 1024)
    assert quantise(w, kind, 64).nbytes / w.nbytes == pytest.approx(share, rel=0.01)


def test_packed_words_have_the_documented_layout() -> None:
    w = quantise(random_weights(3, 64), "int4", 32)
    words, whole = w.values.unflatten(1, (2, 4)), dequantise(w, torch.float32)
    for i, c, group in ((0, 0, 0), (7, 3, 0), (5, 2, 1)):
        scale, low = w.scales[:, group].float().T
        q = (words[:, group, c] >> 4 * i) & 15
        assert torch.equal(whole[:, 32 * group + 4 * i + c], torch.addcmul(low, q.float(), scale))


@pytest.mark.parametrize("row", [r for r in KERNELS if r.operation == "quantised_linear"], ids=lambda row: row.name)
@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_kernels_multiply_with_the_dequantised_weights(row, kind: str, group: int, monkeypatch) -> None:
    if "cpu" not in row.devices:
        pytest.skip("a GPU's: tests/interpreted_quantised.py and tests/gpu/test_quantised_gpu.py")
    monkeypatch.setattr(reference, "BAND_ELEMENTS", 1000)
    w, bias = quantise(random_weights(37, 90), kind, group), random_weights(37).double()
    for shape in (
        (0, 90),
        (1, 90),
        (5, 90),
        (2, 3, 90),
        (skinny_gemm_cpu.MAX_QUANTISED_ROWS, 90),
        (skinny_gemm_cpu.MAX_QUANTISED_ROWS + 1, 90),
    ):
        x = random_weights(*shape).double()
        exact = x @ dequantise(w, torch.float64).T
        assert (row.run(x, w) - exact).abs().max().nan_to_num() < 1e-12 if x.numel() else row.run(x, w).shape == (0, 37)
        assert torch.equal(row.run(x, w, bias), row.run(x, w) + bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_few_rows_are_at_least_as_precise_as_many(kind: str, group: int, dtype: torch.dtype) -> None:
    w, x = quantise(random_weights(37, 300), kind, group), random_weights(5, 300, seed=1).to(dtype)
    exact = x.double() @ dequantise(w, torch.float64).T
    got = skinny_gemm_cpu.quantised_linear(x, w)
    assert (
        got.dtype == dtype
        and (got - exact).norm() / exact.norm() < {torch.bfloat16: 2.5e-3, torch.float32: 2e-6}[dtype]
    )
    assert got.is_contiguous()


def test_every_float8_value_widens_exactly() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    every = every[every.float().isfinite()]
    assert len(every) == 254
    for dtype in (torch.float32, torch.float64):
        got, expected = to_float(every, dtype), every.to(dtype)
        assert torch.equal(got, expected) and torch.equal(got.signbit(), expected.signbit())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_non_finite_weights_are_refused(bad: float, kind: str, group: int) -> None:
    layer = Linear(64, 3, bias=False, device=torch.device("cpu"), dtype=torch.float32)
    w = random_weights(3, 64)
    w[1, 40] = bad
    with pytest.raises(CheckpointError, match=f"3 × 64 is not finite and cannot be quantised to {kind}"):
        layer.quantise(w, kind, group, lambda x: x)
    assert layer.quantised is None


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["gpt2", "llama_grouped_biased", "qwen3_window_tied", "latent_yarn_biased"])
@pytest.mark.parametrize("format", ["hf", "colonnade"])
def test_model_is_quantised_while_loading(name: str, format: str, tmp_path: Path) -> None:
    """Both formats give the same bits; outputs are those of the dequantised weights."""
    if name.startswith("latent") and format == "hf":
        pytest.skip("the tiny latent shape is of no Hugging Face family")
    context = DistributedContext.solo(torch.device("cpu"))
    whole = api.Model(build(CONFIGS[name], dtype=torch.float32), None, context, "tiny")
    if format == "hf":
        write_hf(whole.transformer, tmp_path / "m", shard_bytes=4000)
    else:
        api.save(whole, tmp_path / "m")
    tokens = torch.arange(20) % 50
    for kind in ("int8", "int4", "float8"):
        model = api.load(tmp_path / "m", dtype="float64", device="cpu", weights=kind, weight_group=32)
        assert quantised_kind(model.transformer) == kind
        layers = {n: m for n, m in model.transformer.named_modules() if isinstance(m, QuantisableMatrix)}
        plain = build(CONFIGS[name], dtype=torch.float64)
        for n, p in plain.named_parameters():  # quantised weights dequantised; all others unchanged
            stem = n.removesuffix(".weight")
            original = whole.transformer.get_parameter(n)
            if stem in layers and layers[stem].quantised is not None:
                expected = "int8" if kind == "int4" and n in ("unembed.weight", "embed.tokens.weight") else kind
                assert layers[stem].quantised.kind == expected
                again = quantise(original, expected, 32)
                assert torch.equal(again.values.view(torch.uint8), layers[stem].quantised.values.view(torch.uint8))
                p.data = dequantise(again, torch.float64)
            else:
                assert "embed" in n or "norm" in n or "bias" in n or "kv_up" in n, n
                p.data = original.double()
        exact = api.Model(plain, None, model.context, "tiny")
        assert (model.logits(tokens) - exact.logits(tokens)).abs().max() < 1e-10
        assert model.score([1, 5, 3, 7]).nll == pytest.approx(exact.score([1, 5, 3, 7]).nll, abs=1e-10)
        assert weight_bytes(model.transformer) < weight_bytes(plain)
        again = api.load(api.save(model, tmp_path / f"again {kind}"), dtype="float64", device="cpu")
        assert quantised_kind(again.transformer) == kind
        assert torch.equal(again.logits(tokens), model.logits(tokens))


def test_unsupported_settings_are_refused() -> None:
    llama = preset("llama-2-7b")
    for weights, group, tp in (("int4", 128, 4), ("int4", 64, 8)):
        with pytest.raises(
            PlanError, match=rf"one scale for {group} inputs, and tp={tp} leaves each rank \d+ of ffn_width"
        ):
            check_quantised(llama, weights, group, tp)
    check_quantised(llama, "int4", 64, 4)
    check_quantised(llama, "int8", 64, 8)
    check_quantised(llama, "int4", 128, 1)
    with pytest.raises(ConfigError, match="are for models that generate"):
        check_quantised(BERTS["post_masked"], "int8", 64, 1)
    moe = tiny.config(ffn_width=35, moe=MoeConfig(experts=4, active=2, ffn_width=64, shared_width=256))
    check_quantised(
        moe.replace(heads=16, head_width=16), "int4", 64, 2
    )  # no layer has the 35 hidden units of a dense one
    check_quantised(moe, "int8", 64, 2, etp=4)
    with pytest.raises(PlanError, match=r"etp=2 leaves each rank 32 of moe.ffn_width 64.*use --serve.weight_group 32"):
        check_quantised(moe, "int4", 64, 1, etp=2)
    with pytest.raises(PlanError, match=r"etp=4 leaves each rank 16 of moe.ffn_width 64.*use another etp, or --serve"):
        check_quantised(moe, "int4", 32, 1, etp=4)
    with pytest.raises(PlanError, match=r"tp=2 leaves each rank 32 of moe.shared_width 64"):
        check_quantised(moe.replace(heads=16, head_width=16, moe=moe.moe.replace(shared_width=64)), "int4", 64, 2)
    with pytest.raises(
        ConfigError, match=r"serve.weights is int4, but this model's weights are stored.*load it with weights"
    ):
        Engine(tiny.model(), tiny.tokenizer(), ServeConfig(weights="int4"))
    with pytest.raises(ConfigError):
        ServeConfig(weights="int5")
    for kind in ("int3", "INT8", 8, "stored"):
        with pytest.raises(
            ConfigError, match=rf"unknown weight format {kind!r}; use int8, int4, float8, int8_dynamic or ternary"
        ):
            quantise(random_weights(3, 32), kind)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"weights": "int3"},
            "weights is 'int3'; it must be 'stored', 'dense', 'int8', 'int4', 'float8', 'int8_dynamic', 'ternary' or "
            "'file'",
        ),
        ({"weights": "INT8"}, "weights is 'INT8'; it must be 'stored'"),
        ({"weights": 8}, "weights is 8; it must be 'stored'"),
        ({"weights": "int4", "weight_group": 48}, "weight_group is 48; it must be 32, 64 or 128"),
        ({"dtype": "float31"}, "dtype is 'float31'; it must be 'auto', 'float32'"),
        ({"dtype": torch.int8}, "dtype is 'int8'; it must be 'auto'"),
        ({"device": "tpu"}, "device is 'tpu'; it must be 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_unknown_load_option_is_refused_before_reading(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        api.load("/nowhere", **given)


def test_model_reports_its_weight_format(tmp_path: Path) -> None:
    whole = api.Model(tiny.model(dtype=torch.float32), None, DistributedContext.solo(torch.device("cpu")), "tiny")
    with pytest.raises(ConfigError, match="format is 'onnx'; it must be 'hf', 'colonnade' or 'gguf'"):
        api.save(whole, tmp_path / "m", format="onnx")
    api.save(whole, tmp_path / "m")
    for weights, output in (("stored", "float32, one process"), ("int4", "float32 with weights in int4, one process")):
        with api.load(tmp_path / "m", device="cpu", weights=weights) as model:
            assert output in repr(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "share", "worse"),
    [("int8", 1 / 4, 0.02), pytest.param("int4", 5 / 32, 0.03, marks=pytest.mark.long)],
)
def test_quantised_smollm2_generates_similar_text(weights: str, share: float, worse: float) -> None:
    """Real weights: greedy text, perplexity, memory. (The file itself has 4 bits, in groups of 32.)"""
    text = Path(api.__file__).read_text(encoding="utf-8")[:400]
    output, perplexity, size = [], [], []
    for unquantised_bytes in ("stored", weights):
        model = api.load("smollm2", dtype="float32", device="cpu", weights=unquantised_bytes, weight_group=32)
        output.append(model.generate("The capital of France is", temperature=0, max_tokens=4))
        perplexity.append(model.score(text).perplexity)
        embedding_bytes = 49152 * (576 * 4 if unquantised_bytes == "stored" else 576 + 4)  # 8 bits, one scale per row
        size.append(weight_bytes(model.transformer) - embedding_bytes)
    assert output[0] == output[1] and "Paris" in output[0]
    assert perplexity[1] == pytest.approx(perplexity[0], rel=worse)
    assert size[1] / size[0] == pytest.approx(share, rel=0.01)
