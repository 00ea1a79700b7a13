"""GGUF files as the gguf package's own reader and dequantiser see them, and as we read them back."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from colonnade import api
from colonnade.checkpoint.gguf.write import write_gguf
from colonnade.checkpoint.load_model import open_model
from colonnade.cli.main import main
from colonnade.compress import Compression, compress
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError, ConfigError
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import copy_weight, dense, quantised_parameters
from colonnade.parallel.distributed_context import DistributedContext
from tests.models import CONFIGS, MOES, build

LLAMA = ModelConfig(vocab_size=301, layers=2, width=64, heads=8, kv_heads=4, head_width=16, ffn_width=128, context=64)
FAMILIES = {
    "llama": LLAMA,
    "qwen3": LLAMA.replace(family="qwen3", qk_norm=True, tied=True),
    "gpt2": CONFIGS["gpt2"].replace(width=64, heads=4, head_width=16, ffn_width=128, kv_heads=4),
}


def read(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """(type, values) of every tensor, by the gguf package."""
    return {
        tensor.name: (tensor.tensor_type.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"weights": "int4", "grid": "symmetric", "weight_group": 32}, "Q4_0"),
        ({"weights": "int4", "grid": "affine", "weight_group": 32}, "Q4_1"),
        ({"weights": "int8"}, "Q8_0"),
        (None, "F16"),
    ],
    ids=["Q4_0", "Q4_1", "Q8_0", "F16"],
)
def test_values_are_ours(family, settings, kind, tmp_path) -> None:
    model = build(FAMILIES[family], dtype=torch.float32).requires_grad_(False)
    if settings is not None:
        compress(model, Compression(by="nearest", **settings))
    write_gguf(model, tmp_path / "m.gguf")
    tensors, down = read(tmp_path / "m.gguf"), quantised_parameters(model).get("blocks.1.ffn.down.weight")
    found, values = tensors["blk.1.ffn_down.weight"]
    expected = model.get_parameter("blocks.1.ffn.down.weight") if down is None else dense("", down)
    assert found == kind
    exact = {"Q4_0": 0, "Q4_1": 0, "Q8_0": 0.005, "F16": 0.0005}[kind]
    error = np.abs(values - expected.numpy()).max() / np.abs(expected.numpy()).max()
    assert error <= exact
    opened = open_model(tmp_path / "m.gguf")
    unknown = {"init_std": 0.02}
    assert opened.config.replace(**unknown) == model.config.replace(**unknown)
    again = Transformer(opened.config)
    opened.load_weights(again, DistributedContext.solo(torch.device("cpu")), copy_weight)
    for name in ("blocks.0.attention.qkv.weight", "blocks.1.attention.out.weight"):
        weight = quantised_parameters(model).get(name)
        ours = model.get_parameter(name) if weight is None else dense(name, weight)
        difference = (again.get_parameter(name) - ours).abs().max() / ours.abs().max()
        assert difference <= exact, name


@pytest.mark.slow
def test_smollm2_with_its_tokenizer(tmp_path) -> None:
    """From the command line: tokens, template and greedy text are those of the source."""
    source = api.load("smollm2", dtype="float32", device="cpu")
    path = tmp_path / "small.gguf"
    main(["convert", "smollm2", str(path), "--format", "gguf"])
    reader = gguf.GGUFReader(path)
    assert reader.get_field("tokenizer.ggml.pre").contents() == "smollm"
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == source.config.vocab_size
    with api.load(path, dtype="float32", device="cpu") as again:
        text = "Twenty-three años: naïve 漢字 <|im_start|>user\n 12345"
        assert again.tokenizer.encode(text) == source.tokenizer.encode(text)
        assert again.tokenizer.chat_template == source.tokenizer.chat_template
        assert (again.tokenizer.bos_id, again.tokenizer.eos_ids) == (source.tokenizer.bos_id, source.tokenizer.eos_ids)
        options = {"max_tokens": 6, "temperature": 0}
        prompt = "The capital of France is"
        assert again.generate(prompt, **options) == source.generate(prompt, **options)


def test_refusals(tmp_path) -> None:
    model = build(LLAMA, dtype=torch.float32).requires_grad_(False)
    with pytest.raises(ConfigError, match=r"must end in \.gguf"):
        write_gguf(model, tmp_path / "m")
    (tmp_path / "m.gguf").write_text("here")
    with pytest.raises(CheckpointError, match="exists; use"):
        write_gguf(model, tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="are not written"):
        write_gguf(build(MOES["gated"], dtype=torch.float32), tmp_path / "e.gguf")
    compress(model, Compression(by="nearest", weight_group=64))
    with pytest.raises(ConfigError, match="--weight_group 32"):
        write_gguf(model, tmp_path / "g.gguf")
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == ["m.gguf"]


@pytest.mark.parametrize("error", [OSError("4096 requested and 12 written"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_file_that_cannot_be_written(error, monkeypatch, tmp_path) -> None:
    """numpy's error of a full disk has no error number."""

    def write(_: object) -> None:
        raise error

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", write)
    expected = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match="12 written; check the folder" if isinstance(error, OSError) else None):
        write_gguf(build(LLAMA, dtype=torch.float32).requires_grad_(False), tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("grid", ["affine", "symmetric"])
@pytest.mark.parametrize("factor", [2.0**24, 2.0**-16], ids=["too large", "too small"])
def test_int4_scales_outside_float16_are_refused(grid, factor, tmp_path) -> None:
    """A bfloat16 scale beyond 65,504, or so small that float16 rounds it; the message says what to write instead."""
    model = build(LLAMA, dtype=torch.float32).requires_grad_(False)
    compress(model, Compression(by="nearest", weight_group=32, grid=grid))
    quantised_parameters(model)["blocks.0.ffn.up.weight"].scales.mul_(factor)
    with pytest.raises(ConfigError, match=r"'blocks.0.ffn.up.weight' has the int4 scale .*write --format hf or"):
        write_gguf(model, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("weights", "factor", "message"),
    [
        (None, 1e7, "has values beyond float16's 65504, which GGUF needs; write --format hf"),
        ("int8", 1e9, "has int8 scales beyond float16's 65504, which GGUF needs; write --format hf or colonnade"),
    ],
)
def test_values_outside_float16_are_refused(weights, factor, message, tmp_path) -> None:
    model = build(LLAMA, dtype=torch.float32).requires_grad_(False)
    model.get_parameter("blocks.0.ffn.up.weight").mul_(factor)
    if weights is not None:
        compress(model, Compression(by="nearest", weights=weights))
    with pytest.raises(ConfigError, match=message):
        write_gguf(model, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())
