"""CTranslate2's file of Whisper: a synthetic one read whole, damaged ones refused."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from colonnade.checkpoint.ct2 import TABLE, CT2File, whisper_config
from colonnade.checkpoint.hf import config_from_hf, config_to_hf
from colonnade.checkpoint.weight_mapping import map_parameters
from colonnade.config import EncoderConfig
from colonnade.errors import CheckpointError
from colonnade.model import Transformer, initialise

CONFIG = whisper_config(
    vocab_size=61, layers=2, width=24, heads=4, ffn_width=35, context=32,
    encoder=EncoderConfig(layers=3, ffn_width=30, context=14, reads="audio", mels=9, start_token=50257),
)  # fmt: skip


def name(text: str) -> bytes:
    data = text.encode() + b"\0"
    return struct.pack("<H", len(data)) + data


def record(key: str, array: np.ndarray, kind: int) -> bytes:
    sizes = b"".join(struct.pack("<I", n) for n in array.shape)
    return name(key) + struct.pack("<B", array.ndim) + sizes + struct.pack("<BI", kind, array.nbytes) + array.tobytes()


def tensors(model: Transformer) -> dict[str, np.ndarray]:
    """The model's tensors under CTranslate2's names: attention's parts are joined."""
    forms = map_parameters([key for key, _ in model.named_parameters()], TABLE, "the model")
    found: dict[str, np.ndarray] = {}
    for key, p in model.named_parameters():
        if key.startswith("bridge."):
            each = p.detach().unflatten(0, (4, 2, 2, 6))
            for layer in range(2):
                both = [each[:, layer, which].flatten(0, 1) for which in range(2)]
                found[f"decoder/layer_{layer}/attention/linear_1/{key[10:]}"] = torch.cat(both).numpy()
        else:
            found |= {theirs: x.detach().numpy() for theirs, x in forms[key].write(p.detach(), CONFIG).items()}
    return found


def contents(arrays: dict[str, np.ndarray], spec: str = "WhisperSpec", version: int = 6) -> bytes:
    heads = np.array(4, np.int16)
    records = [record(key, array.astype(np.float32), 0) for key, array in arrays.items()]
    records += [record(f"{stack}/num_heads", heads, 2) for stack in ("encoder", "decoder")]
    head = struct.pack("<I", version) + name(spec) + struct.pack("<II", 3, len(records))
    aliases = struct.pack("<I", 1) + name("decoder/projection/weight") + name("decoder/embeddings/weight")
    return head + b"".join(records) + aliases


@pytest.fixture(scope="module")
def model() -> Transformer:
    return initialise(Transformer(CONFIG), 0)


def test_a_file_is_read_whole(model: Transformer, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(contents(tensors(model)))
    file = CT2File(tmp_path)
    assert file.config == CONFIG
    read = Transformer(CONFIG)
    file.load_weights(read)
    expected = dict(model.named_parameters())
    assert all(torch.equal(p, expected[key]) for key, p in read.named_parameters())


def test_the_config_of_equal_widths_can_be_written_for_hugging_face(model: Transformer, tmp_path: Path) -> None:
    """As in Whisper's own sizes: one number stands for both widths."""
    arrays = tensors(model)
    for layer in range(3):
        ffn = f"encoder/layer_{layer}/ffn"
        arrays[f"{ffn}/linear_0/weight"] = np.zeros((35, 24))
        arrays[f"{ffn}/linear_0/bias"] = np.zeros(35)
        arrays[f"{ffn}/linear_1/weight"] = np.zeros((24, 35))
    (tmp_path / "model.bin").write_bytes(contents(arrays))
    config = CT2File(tmp_path).config
    raw = config_to_hf(config)
    assert (raw["encoder_ffn_dim"], raw["decoder_ffn_dim"]) == (35, 35)
    assert config_from_hf(raw) == config


def test_damaged_files_are_refused(model: Transformer, tmp_path: Path) -> None:
    arrays = tensors(model)
    whole = contents(arrays)

    def refused(data: bytes, message: str) -> None:
        (tmp_path / "model.bin").write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            CT2File(tmp_path)

    for size in (0, 3, 20, 300, len(whole) // 2):
        refused(whole[:size], "truncated")
    refused(contents(arrays, "TransformerSpec"), "version 6 of 'TransformerSpec'; only version 6 of WhisperSpec")
    refused(contents(arrays, version=4), "version 4")
    refused(whole[:22] + b"\xff\xff\xff\xff" + whole[26:], "lists 4,294,967,295 tensors")
    few = {key: x for key, x in arrays.items() if "layer_1/ffn/linear_0/weight" not in key}
    refused(contents(few), "lacks the tensor 'decoder/layer_1/ffn/linear_0/weight'")
    wrong = arrays | {"decoder/embeddings/weight": np.zeros((61, 23))}
    refused(contents(wrong), "width 23 is not divisible by 4 heads|of shape")
    refused(contents(arrays | {"a/weight_scale": np.zeros(3)}), "is quantised")
    with pytest.raises(CheckpointError, match="No such file"):
        CT2File(tmp_path / "none")
