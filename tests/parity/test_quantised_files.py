"""Quantised Hugging Face folders: others' formats dequantise bit for bit; ours give transformers the very logits."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from colonnade import api
from colonnade.checkpoint.hf.quantised_formats import AWQ_ORDER, E2M1, mxfp4_values
from colonnade.checkpoint.hf.write import write_hf
from colonnade.compress import Compression, compress
from colonnade.config import ModelConfig, MoeConfig, Plan
from colonnade.errors import CheckpointError, ConfigError
from colonnade.kernels.linear.quantise import dequantise
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import dense, quantised_parameters
from colonnade.parallel.distributed_context import DistributedContext
from tests.models import build
from tests.parity.test_quantised_tp import _load
from tests.worlds import assert_same, run

CONFIG = ModelConfig(vocab_size=301, layers=2, width=64, heads=8, kv_heads=4, head_width=16, ffn_width=128, context=64)
MIXTRAL = CONFIG.replace(family="mixtral", moe=MoeConfig(experts=4, active=2, ffn_width=64))
MATRICES = {
    "model.layers.{i}.self_attn.q_proj": (128, 64),
    "model.layers.{i}.self_attn.k_proj": (64, 64),
    "model.layers.{i}.self_attn.v_proj": (64, 64),
    "model.layers.{i}.self_attn.o_proj": (64, 128),
    "model.layers.{i}.mlp.gate_proj": (128, 64),
    "model.layers.{i}.mlp.up_proj": (128, 64),
    "model.layers.{i}.mlp.down_proj": (64, 128),
}
GENERATOR = torch.Generator().manual_seed(7)


def model_of(config: ModelConfig = CONFIG) -> Transformer:
    return build(config, dtype=torch.float32).requires_grad_(False)


def wrap(model: Transformer) -> api.Model:
    return api.Model(model, None, DistributedContext.solo(torch.device("cpu")), "tiny")


def theirs(folder: Path, dtype: torch.dtype = torch.float32):
    """The model of transformers."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize(
    ("settings", "tied"),
    [
        ({"weights": "int4", "grid": "symmetric", "weight_group": 32}, False),
        ({"weights": "int4", "grid": "symmetric", "weight_group": 32}, True),
        ({"weights": "int8"}, True),
        ({"weights": "float8"}, False),
    ],
    ids=["int4", "int4 tied", "int8 tied", "float8"],
)
def test_transformers_gives_the_very_logits(settings, tied, tmp_path) -> None:
    model = model_of(CONFIG.replace(tied=tied))
    compress(model, Compression(by="nearest", **settings))
    api.save(wrap(model), tmp_path / "m", format="hf")
    tokens = torch.arange(20)
    peer = theirs(tmp_path / "m")
    with torch.no_grad():
        expected = peer(tokens[None]).logits[0]
    with api.load(tmp_path / "m", weights="dense", dtype="float32", device="cpu") as ours:
        torch.testing.assert_close(ours.logits(tokens), expected, rtol=1e-5, atol=1e-5)
        weight = peer.model.layers[1].mlp.down_proj.weight
        assert torch.equal(ours.transformer.get_parameter("blocks.1.ffn.down.weight"), weight)
    with api.load(tmp_path / "m", dtype="float32", device="cpu") as ours:  # as stored
        for name, weight in quantised_parameters(ours.transformer).items():
            before = quantised_parameters(model)[name]
            assert torch.equal(weight.values.view(torch.uint8), before.values.view(torch.uint8)), name
            assert torch.equal(weight.scales.float(), before.scales.float())
        assert len(quantised_parameters(ours.transformer)) == 10


def test_w8a8_is_what_transformers_computes_up_to_its_rounding(tmp_path) -> None:
    """Weights are equal; inputs have a scale per token there, and one per 32 inputs here."""
    model = model_of()
    compress(model, Compression(by="nearest", weights="int8_dynamic"))
    api.save(wrap(model), tmp_path / "m", format="hf")
    tokens, peer = torch.arange(20), theirs(tmp_path / "m")
    with torch.no_grad():
        expected = peer(tokens[None]).logits[0]
    with api.load(tmp_path / "m", dtype="float32", device="cpu") as ours:
        for name, weight in quantised_parameters(ours.transformer).items():
            assert torch.equal(weight.values, quantised_parameters(model)[name].values)
    difference = (wrap(model).logits(tokens) - expected).norm() / expected.norm()
    assert difference < 0.02


def test_zero_points_are_what_their_package_reads(tmp_path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    model = model_of()
    compress(model, Compression(by="nearest", grid="zero", weight_group=32))
    api.save(wrap(model), tmp_path / "m", format="hf")
    raw = load_file(tmp_path / "m" / "model.safetensors")
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    args = {k: v for k, v in config["config_groups"]["group_0"]["weights"].items() if v is not None}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    stem = "model.layers.1.mlp.down_proj."
    state = {name.removeprefix(stem): x for name, x in raw.items() if name.startswith(stem)}
    weight = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    ours = dequantise(quantised_parameters(model)["blocks.1.ffn.down.weight"], torch.float32)
    assert torch.equal(weight, ours.to(weight.dtype))
    with api.load(tmp_path / "m", dtype="float32", device="cpu") as loaded:
        for name, weight in quantised_parameters(loaded.transformer).items():
            assert torch.equal(dense(name, weight), dense(name, quantised_parameters(model)[name])), name


def test_experts_are_written_and_read_one_by_one(tmp_path) -> None:
    model = model_of(MIXTRAL)
    compress(model, Compression(by="nearest", grid="symmetric", weight_group=32))
    api.save(wrap(model), tmp_path / "m", format="hf", shard_bytes=20_000)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 3
    with api.load(tmp_path / "m", dtype="float32", device="cpu") as loaded:
        found = quantised_parameters(loaded.transformer)
        assert "blocks.1.ffn.experts.down" in found
        for name, weight in quantised_parameters(model).items():
            if name.startswith("blocks."):
                assert torch.equal(found[name].values, weight.values), name
                assert torch.equal(found[name].scales.float(), weight.scales.float()), name


def foreign(folder: Path, config: dict, pack, config_of: ModelConfig = CONFIG) -> dict[str, torch.Tensor]:
    """A folder whose matrices ``pack(F, D)`` makes as (tensors by ending, weight); the weights by their name."""
    write_hf(model_of(config_of), folder)
    raw = load_file(folder / "model.safetensors")
    weights: dict[str, torch.Tensor] = {}
    for i in range(config_of.layers):
        for template, (rows, columns) in MATRICES.items():
            stem = template.replace("{i}", str(i))
            del raw[f"{stem}.weight"]
            tensors, weights[f"{stem}.weight"] = pack(rows, columns)
            raw |= {f"{stem}.{ending}": x.contiguous() for ending, x in tensors.items()}
    save_file(raw, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    return weights


def integers(rows: int, columns: int, group: int = 32) -> tuple[torch.Tensor, ...]:
    """Random q, zero points 1 … 15 and float16 scales, and (q − z) s in float16 as others compute it."""
    q = torch.randint(16, (rows, columns), generator=GENERATOR)
    z = torch.randint(1, 16, (rows, columns // group), generator=GENERATOR)
    s = (torch.rand(rows, columns // group, generator=GENERATOR) * 0.02 + 0.001).half()
    w = (q - z.repeat_interleave(group, 1)).half() * s.repeat_interleave(group, 1)
    return q, z, s, w


def to_words(values: torch.Tensor, order=range(8)) -> torch.Tensor:
    """Eight columns of each row in a word, value ``order[k]`` in nibble k; one at a time, in Python integers."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for row, line in enumerate(values.tolist()):
        for c in range(len(line) // 8):
            word = sum(line[8 * c + column] << 4 * k for k, column in enumerate(order))
            words[row, c] = word - (1 << 32) if word >= 1 << 31 else word
    return words.int()


def gptq(rows: int, columns: int, first: int = 1):
    q, z, s, w = integers(rows, columns)
    tensors = {
        "qweight": to_words(q).T, "qzeros": to_words(z.T - first), "scales": s.T,
        "g_idx": torch.arange(columns, dtype=torch.int32) // 32,
    }  # fmt: skip
    return tensors, w


def awq(rows: int, columns: int):
    q, z, s, w = integers(rows, columns)
    return {"qweight": to_words(q.T, AWQ_ORDER), "qzeros": to_words(z.T, AWQ_ORDER), "scales": s.T}, w


def blocks(rows: int, columns: int):
    values = torch.randn(rows, columns, generator=GENERATOR).to(torch.float8_e4m3fn)
    s = torch.rand(-(-rows // 48), -(-columns // 40), generator=GENERATOR) * 0.01
    w = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            w[row, column] = values[row, column].float() * s[row // 48, column // 40]
    return {"weight": values, "weight_scale_inv": s}, w


def mxfp4(rows: int, columns: int):
    q = torch.randint(16, (rows, columns), generator=GENERATOR)
    e = torch.randint(118, 124, (rows, columns // 32), generator=GENERATOR)
    w = torch.tensor([[E2M1[v] for v in line] for line in q.tolist()]) * (2.0 ** (e - 127)).repeat_interleave(32, 1)
    return {"weight_packed": (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8), "weight_scale": e.to(torch.uint8)}, w


def ct(format: str, **weights) -> dict:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


def w8a8(rows: int, columns: int):
    values = torch.randint(-127, 128, (rows, columns), generator=GENERATOR, dtype=torch.int8)
    s = torch.rand(rows, 1, generator=GENERATOR).bfloat16() * 0.001
    return {"weight": values, "weight_scale": s}, values.float() * s.float()


FOREIGN = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}, gptq),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
        lambda f, d: gptq(f, d, 0),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [48, 40], "fmt": "e4m3"}, blocks),
    "w8a8": (ct("int-quantized", num_bits=8, strategy="channel"), w8a8),
    "mxfp4": (ct("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32) , mxfp4),
}  # fmt: skip


def _attention(weights: dict[str, torch.Tensor], i: int) -> torch.Tensor:
    """Our interleaved rows of query, key and value."""
    q, k, v = (weights[f"model.layers.{i}.self_attn.{part}_proj.weight"].float() for part in "qkv")
    heads = [torch.cat((q[32 * h : 32 * h + 32], k[16 * h : 16 * h + 16], v[16 * h : 16 * h + 16])) for h in range(4)]
    return torch.cat(heads)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_dequantise_bit_for_bit(name, tmp_path) -> None:
    config, pack = FOREIGN[name]
    weights = foreign(tmp_path / "m", config, pack)
    exact = next(iter(weights.values())).dtype
    with api.load(tmp_path / "m", weights="dense", dtype="float32", device="cpu") as dequantised:
        for i in range(2):
            down = weights[f"model.layers.{i}.mlp.down_proj.weight"]
            for ours, expected in (("ffn.down", down), ("attention.qkv", _attention(weights, i))):
                found = dequantised.transformer.get_parameter(f"blocks.{i}.{ours}.weight")
                assert torch.equal(found.to(exact), expected.to(exact)), ours
        reference = dequantised.logits(torch.arange(9))
    with api.load(tmp_path / "m", dtype="float32", device="cpu") as stored:
        kept = quantised_parameters(stored.transformer)
        assert bool(kept) == (name not in ("fp8", "mxfp4"))
        for ours, weight in kept.items():
            assert torch.equal(dense(ours, weight), dequantised.transformer.get_parameter(ours)), ours
        difference = (stored.logits(torch.arange(9)) - reference).norm() / reference.norm()
        assert difference < 0.02  # kernels may round the inputs of int8


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gptq", "awq", "w8a8"])
def test_two_ranks_read_foreign_files(name, tmp_path) -> None:
    foreign(tmp_path / "m", *FOREIGN[name])
    ((alone, tokens, bits),) = run(1, _load, tmp_path / "m", 1, "stored")
    both = run(2, _load, tmp_path / "m", 2, "stored")
    for logits, _, _ in both:
        assert_same(logits, alone, 1e-12)
    assert both[0][1] == tokens
    assert torch.equal(torch.cat([part["values"] for _, _, part in both], 1), bits["values"])


def test_a_kept_foreign_model_becomes_a_native_checkpoint(tmp_path) -> None:
    foreign(tmp_path / "m", *FOREIGN["awq"])
    with api.load(tmp_path / "m", dtype="float32", device="cpu") as stored:
        api.save(stored, tmp_path / "native")
        reference = stored.logits(torch.arange(9))
    with api.load(tmp_path / "native", dtype="float32", device="cpu") as again:
        assert torch.equal(again.logits(torch.arange(9)), reference)
    with api.load(tmp_path / "m", plan=Plan(), weights="dense", device="cpu") as loaded:
        assert not quantised_parameters(loaded.transformer)


def test_mxfp4_values() -> None:
    packed, exponents = torch.arange(16, dtype=torch.uint8) | 0x70, torch.tensor([128], dtype=torch.uint8)
    values = mxfp4_values(packed[None], exponents[None])[0]
    assert values[::2].tolist() == [2 * v for v in E2M1]
    assert values[1::2].tolist() == [12.0] * 16
    assert mxfp4_values(packed[None], torch.full((1, 1), 255, dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "method 'bitsandbytes', and only compressed-tensors, gptq, awq, fp8 are"),
        ({"bits": 3}, "GPTQ weights of 3 bits"),
        ({"group_size": 7}, "groups of 7 inputs"),
        ({"group_size": 10**30}, "has groups of"),
        ({"group_size": 64}, r"\.scales' as F16 \[4, 64\].*implies.*\[2, 64\]"),
    ],
)
def test_other_configs_are_refused(change, message, tmp_path) -> None:
    config, pack = FOREIGN["gptq"]
    foreign(tmp_path / "m", config | change, pack)
    with pytest.raises(CheckpointError, match=message):
        api.load(tmp_path / "m", device="cpu")


def test_unsorted_groups_are_refused(tmp_path) -> None:
    def pack(rows, columns):
        tensors, w = gptq(rows, columns)
        return tensors | {"g_idx": tensors["g_idx"].flip(0)}, w

    foreign(tmp_path / "m", FOREIGN["gptq"][0], pack)
    with pytest.raises(CheckpointError, match=r"activation order.*desc_act false"):
        api.load(tmp_path / "m", device="cpu")


def test_a_missing_component_is_named(tmp_path) -> None:
    foreign(tmp_path / "m", *FOREIGN["awq"])
    raw = load_file(tmp_path / "m" / "model.safetensors")
    del raw["model.layers.1.mlp.up_proj.qzeros"]
    save_file(raw, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model.layers.1.mlp.up_proj.qzeros' \[2, 16\]"):
        api.load(tmp_path / "m", device="cpu")


def test_the_affine_grid_is_refused_for_hf(tmp_path) -> None:
    model = model_of()
    compress(model, Compression(by="nearest", weight_group=32))
    with pytest.raises(ConfigError, match="--grid symmetric or zero"):
        api.save(wrap(model), tmp_path / "m", format="hf")
    assert not list(tmp_path.iterdir())
