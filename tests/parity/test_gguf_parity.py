"""A GGUF file and the Hugging Face folder of the same model give the same weights, full or sharded."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader

from colonnade.checkpoint.gguf import GGUFFile
from colonnade.checkpoint.gguf.header import read_header
from colonnade.checkpoint.gguf.read import block_sizes
from colonnade.checkpoint.load_model import find_packaged
from colonnade.errors import CheckpointError
from colonnade.model import Transformer
from colonnade.parallel.axis import SOLO_AXES, Axes, Axis
from colonnade.parallel.layout import layout_of, local_part
from tests.gguf_files import dequantised, quantisable, write_gguf
from tests.hf import load
from tests.parity.test_hf_parity import reference


def from_gguf(path: Path, axes: Axes = SOLO_AXES) -> Transformer:
    """Our float32 model from a GGUF file."""
    file = GGUFFile(path)
    model = Transformer(file.config, axes)
    file.load_weights(model)
    return model


EXACT = [
    "llama",
    "llama-tied-biases-wide-heads",
    "mistral-full",
    "qwen2",
    "qwen3",
    "gpt2",
    "gpt2-untied-relu",
    "gpt2-four-heads",
]


@pytest.mark.parametrize("case", EXACT)
def test_gguf_weights_equal_the_hugging_face_folder(case: str, tmp_path: Path) -> None:
    theirs = reference(case)
    theirs.save_pretrained(tmp_path / "hf")
    ours = load(tmp_path / "hf", dtype=torch.float32)
    model = from_gguf(write_gguf(tmp_path / "model.gguf", theirs))
    # GGUF does not store the activation (implied by the architecture) or the initial deviation; Mistral is "llama".
    not_stored = {"activation": ours.config.activation, "init_std": ours.config.init_std, "family": ours.config.family}
    assert model.config.replace(**not_stored) == ours.config
    expected = dict(ours.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.pop(name)), name
    assert not expected


def test_bidirectional_models_and_absent_features_load(tmp_path: Path) -> None:
    keys = {"attention.causal": False, "expert_count": 0, "pooling_type": 1, "final_logit_softcapping": 0.0}
    for kind in ("llama", "qwen2"):
        plain = GGUFFile(write_gguf(tmp_path / "plain.gguf", quantisable(kind))).config
        assert plain.causal
        path = write_gguf(tmp_path / "both.gguf", quantisable(kind), keys=keys)
        assert GGUFFile(path).config == plain.replace(causal=False)


@pytest.mark.parametrize(
    "kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1], ids=lambda k: k.name
)
def test_quantised_shards_equal_slices_of_the_full_weights(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", quantisable("qwen2"), kind)
    whole = from_gguf(path)
    down = torch.from_numpy(dequantised(path, "blk.1.ffn_down.weight"))
    assert torch.equal(whole.get_parameter("blocks.1.ffn.down.weight"), down)
    layout = layout_of(whole)
    for tp in (2, 4):  # shards of 96 columns over 2 and 4 ranks start inside a block of 32
        for rank in range(tp):
            axes = Axes(tp=Axis("tp", tp, rank))
            for name, parameter in from_gguf(path, axes).named_parameters():
                assert torch.equal(parameter, local_part(whole.get_parameter(name), layout[name], axes)), (
                    name,
                    tp,
                    rank,
                )


def test_llama31_rope_scaling_is_recognised_from_the_divisors(tmp_path: Path) -> None:
    theirs = quantisable("llama")
    width, theta = 16, 10000.0
    frequency = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = 8192 * frequency / (2 * math.pi)
    keep = ((turns - 1.0) / 3.0).clamp(0, 1)
    divisors = (1 / ((1 - keep) / 8.0 + keep)).float()
    assert 1.0 < divisors[divisors < 8].max() < 8.0 == divisors.max(), "all three frequency bands occur"
    path = write_gguf(tmp_path / "model.gguf", theirs, extra={"rope_freqs.weight": divisors})
    config = GGUFFile(path).config
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("llama3", 8.0)
    assert Transformer(config)._theta.tolist() == pytest.approx((frequency / divisors).tolist(), rel=1e-6)
    divisors[3] *= 1.1
    path = write_gguf(tmp_path / "other.gguf", theirs, extra={"rope_freqs.weight": divisors})
    with pytest.raises(CheckpointError, match=r"differently from Llama 3\.1"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, ("linear", 4.0, None)),
        ({"rope.scale_linear": 2.0}, ("linear", 2.0, None)),
        ({"rope.scaling.factor": 2.0}, ("linear", 2.0, None)),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 8},
            ("yarn", 4.0, None),
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 8,
                "rope.scaling.attn_factor": 0.5,
            },
            ("yarn", 4.0, 0.5 * (0.1 * math.log(4.0) + 1)),
        ),
    ],
)
def test_rotary_scaling(keys: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    scaling = GGUFFile(write_gguf(tmp_path / "model.gguf", quantisable("llama"), keys=keys)).config.rope_scaling
    assert (scaling and (scaling.kind, scaling.factor, scaling.attention_factor)) == expected


def test_repeated_output_projection_is_tied(tmp_path: Path) -> None:
    theirs = quantisable("llama")
    embedding = theirs.get_input_embeddings().weight.detach()
    with torch.no_grad():
        theirs.lm_head.weight.copy_(embedding)
    model = from_gguf(write_gguf(tmp_path / "tied.gguf", theirs, Kind.Q8_0))
    assert model.config.tied
    with torch.no_grad():
        theirs.lm_head.weight[3, 5] += 1
    model = from_gguf(write_gguf(tmp_path / "untied.gguf", theirs, Kind.Q8_0))
    assert not model.config.tied


@pytest.mark.slow
def test_header_agrees_with_the_gguf_package() -> None:
    path = find_packaged("smollm2")
    header, reader = read_header(path, block_sizes()), GGUFReader(path)
    assert header.values == {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.start, info.bytes, info.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert np.array_equal(header.data[info.start : info.start + 64], tensor.data.view(np.uint8).reshape(-1)[:64])
