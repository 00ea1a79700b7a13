"""Writes a GGUF file, which llama.cpp and its relatives read.

    Q8_0   blocks of 32 values q d           for 8 bits, and for everything but the blocks' matrices
    Q4_0   blocks of 32 values (q − 8) d     int4 in groups of 32 on the symmetric grid, value for value
    Q4_1   blocks of 32 values q d + m       int4 in groups of 32 on the affine grid, value for value
    F16    everything else with two dimensions

Scales are float16 there. int4 scales outside its range are refused; those of int8 and float8, one per row, are chosen
again per block of 32. Vectors are float32. The file is complete or does not exist.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from colonnade.checkpoint.gguf.read import TABLES, gguf_package
from colonnade.checkpoint.gguf.tokenizer import CONTROL, PRE_TOKENIZERS, USER_DEFINED
from colonnade.checkpoint.weight_mapping import ParamMapping, map_parameters
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError, ConfigError
from colonnade.kernels.linear.quantise import Quantised, unpack_int4
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import dense, quantised_parameters

BLOCK = 32
"""Values that share a scale."""
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2"}
NORMAL, UNUSED = 1, 5
"""ggml's types of ordinary tokens and of rows without a token."""
FLOAT16_MAX = torch.finfo(torch.float16).max
ZERO_SCALE = 2.0**-60
"""Scales below are of groups of zeros."""
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}
"""llama.cpp's numbers of what most matrices are."""


class WritableTokenizer(Protocol):
    """The tokenizer interface that this module uses."""

    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None

    @property
    def json(self) -> str:
        """The contents of its tokenizer.json."""
        ...


def write_gguf(
    model: Transformer,
    path: Path | str,
    *,
    tokenizer: WritableTokenizer | None = None,
    dense_as: Literal["F16", "Q8_0"] = "F16",
    overwrite: bool = False,
) -> None:
    """Write ``model`` as the file ``path``; quantised matrices unchanged, others as ``dense_as``.

    Raises :class:`ConfigError` for a model that the format cannot represent, :class:`CheckpointError` for a file that
    exists or cannot be written.
    """
    path, gguf = Path(path), gguf_package()
    _check(model, path, overwrite)
    architecture = ARCHITECTURES[model.config.family]
    quantised, shapes = quantised_parameters(model), model.global_shapes()
    mappings = map_parameters(list(shapes), TABLES[architecture], str(path))
    partial = path.with_name(f".{path.name}.partial")
    writer = gguf.GGUFWriter(partial, architecture)
    plain = dict((*model.named_parameters(), *model.named_buffers()))
    kinds: list[str] = []
    with torch.no_grad():
        for name in shapes:
            weight = quantised.get(name)
            tensors = _tensors(
                name, plain.get(name) if weight is None else weight, mappings[name], model.config, dense_as
            )
            for theirs, (data, kind) in tensors.items():
                raw = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
                writer.add_tensor(theirs, data, raw_dtype=raw)
                if name.startswith("blocks.") and kind != "F32":
                    kinds.append(kind)
    _write_metadata(writer, model.config, architecture)
    writer.add_file_type(FILE_TYPES[max(kinds, key=kinds.count)])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer, model.config.vocab_size)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    except BaseException as why:
        partial.unlink(missing_ok=True)
        if isinstance(why, OSError):  # numpy's has no strerror on a full disk
            reason = why.strerror or str(why)
            raise CheckpointError(f"{path} cannot be written: {reason}; check the folder and its free space") from why
        raise


def check_name(path: Path, overwrite: bool) -> None:
    """Raise unless ``path`` may be written as a GGUF file."""
    if path.suffix != ".gguf":
        raise ConfigError(f"{path} is not a GGUF file name; it must end in .gguf")
    if path.exists() and not (overwrite and path.is_file()):
        raise CheckpointError(f"{path} already exists; use another name, or --overwrite")


def _check(model: Transformer, path: Path, overwrite: bool) -> None:
    config = model.config
    check_name(path, overwrite)
    if config.moe is not None or config.latent is not None or config.family not in ARCHITECTURES:
        raise ConfigError(f"GGUF files of '{config.family}' are not written; use one of {', '.join(ARCHITECTURES)}")
    if config.rope_scaling is not None:
        raise ConfigError(
            "GGUF files with scaled rotary frequencies are not written; write --format hf and convert that"
        )
    if model.axes.tp.size > 1:
        raise ConfigError(f"GGUF files are written by one process, not by {model.axes.tp.size}; load without a plan")


Written = tuple[np.ndarray, str]


def _tensors(
    name: str, value: Tensor | Quantised | None, mapping: ParamMapping, config: ModelConfig, dense_as: str
) -> dict[str, Written]:
    """The file's tensors of a parameter, with their types."""
    assert value is not None, name
    if isinstance(value, Quantised) and value.kind == "int4" and name.startswith("blocks."):
        return _int4_tensors(name, value, mapping, config)
    kind = dense_as
    if isinstance(value, Quantised):
        kind = "F16" if value.kind == "float8" else "Q8_0"
        value = dense(name, value)
    found: dict[str, Written] = {}
    for theirs, tensor in mapping.write(value.detach().cpu().float(), config).items():
        array = tensor.contiguous().numpy()
        if array.ndim == 1 or theirs.startswith("position_embd"):
            found[theirs] = array, "F32"
        elif kind == "Q8_0" and array.shape[1] % BLOCK == 0:
            if tensor.abs().max() > 127 * FLOAT16_MAX:
                raise ConfigError(
                    f"'{name}' has int8 scales beyond float16's {FLOAT16_MAX:.0f}, which GGUF needs; write --format hf "
                    "or colonnade"
                )
            found[theirs] = gguf_package().quants.quantize(array, gguf_package().GGMLQuantizationType.Q8_0), "Q8_0"
        elif (half := tensor.half()).isfinite().all():
            found[theirs] = half.contiguous().numpy(), "F16"
        else:
            raise ConfigError(
                f"'{name}' has values beyond float16's {FLOAT16_MAX:.0f}, which GGUF needs; write --format hf"
            )
    return found


def _int4_tensors(name: str, weight: Quantised, mapping: ParamMapping, config: ModelConfig) -> dict[str, Written]:
    if weight.group != BLOCK or weight.inputs % BLOCK:
        raise ConfigError(
            f"'{name}' has int4 groups of {weight.group} of its {weight.inputs} inputs, and GGUF has blocks of "
            f"{BLOCK}; "
            f"compress with --weight_group {BLOCK}, or write --format colonnade"
        )
    scale, low = weight.scales.float().unbind(-1)
    symmetric = torch.equal(-8 * scale, low)
    parts = [_float16(name, scale)] if symmetric else [_float16(name, scale), _float16(name, low)]
    values = mapping.write_component(unpack_int4(weight), config)
    columns = [mapping.write_component(part, config) for part in parts]
    found: dict[str, Written] = {}
    for theirs, q in values.items():
        blocks = q.unflatten(1, (-1, 2, BLOCK // 2)).to(torch.uint8)  # byte j: values j and j + 16
        packed = blocks[:, :, 0] | blocks[:, :, 1] << 4
        heads = [column[theirs].half().unsqueeze(-1).contiguous().view(torch.uint8) for column in columns]
        data = torch.cat((*heads, packed), 2).flatten(1).contiguous().numpy()
        found[theirs] = data, "Q4_0" if symmetric else "Q4_1"
    return found


def _float16(name: str, scales: Tensor) -> Tensor:
    """``scales``, all of which are float16 numbers; raises :class:`ConfigError` otherwise."""
    scales = torch.where(scales.abs() < ZERO_SCALE, 0.0, scales)
    if not torch.equal(scales.half().float(), scales):
        worst = float(scales[scales.half().float() != scales].abs().max())
        raise ConfigError(
            f"'{name}' has the int4 scale {worst:.3g}, which is not a float16 number, as GGUF requires; write "
            "--format hf or colonnade, or compress to int8"
        )
    return scales


def _write_metadata(writer: Any, config: ModelConfig, architecture: str) -> None:
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.ffn_width)
    writer.add_head_count(config.heads)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(config.norm_eps)
        return
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    writer.add_rope_dimension_count(config.head_width)
    if config.window:
        writer.add_sliding_window(config.window)


def _write_tokenizer(writer: Any, tokenizer: WritableTokenizer, rows: int) -> None:
    parts = json.loads(tokenizer.json)
    if parts["model"]["type"] != "BPE":
        raise ConfigError(
            f"GGUF files are written with byte-level BPE tokenizers, and this is {parts['model']['type']}; "
            "write --format hf"
        )
    vocab: dict[str, int] = parts["model"]["vocab"]
    added = {token["id"]: token for token in parts.get("added_tokens", [])}
    names = {number: token for token, number in vocab.items()} | {n: token["content"] for n, token in added.items()}
    tokens, types = [], []
    for number in range(rows):
        tokens.append(names.get(number, f"[PAD{number}]"))
        if number in added:
            types.append(CONTROL if added[number]["special"] else USER_DEFINED)
        else:
            types.append(NORMAL if number in names else UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(parts))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = parts["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    if tokenizer.bos_id is not None:
        writer.add_bos_token_id(tokenizer.bos_id)
    for number, add in zip(tokenizer.eos_ids, (writer.add_eos_token_id, writer.add_eot_token_id), strict=False):
        add(number)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _pre_tokenizer(parts: Mapping[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    wanted = _comparable(parts["pre_tokenizer"])
    for name, make in PRE_TOKENIZERS.items():
        probe = Tokenizer(BPE())
        probe.pre_tokenizer = make()
        if _comparable(json.loads(probe.to_str())["pre_tokenizer"]) == wanted:
            return name
    raise ConfigError(
        f"llama.cpp has no name for the tokenizer's pre-tokenization; it supports {', '.join(PRE_TOKENIZERS)}; "
        "write --format hf"
    )


def _comparable(part: Any) -> Any:
    """A pre-tokenizer's description without the settings that do not change its tokens."""
    if isinstance(part, dict):
        return {key: _comparable(value) for key, value in part.items() if key != "trim_offsets"}
    return [_comparable(each) for each in part] if isinstance(part, list) else part
