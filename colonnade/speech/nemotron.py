"""Reads a folder with ``model_type`` nemotron_asr_streaming in Hugging Face's format: config, tokenizer, weights.

The names of its tensors are those of transformers; ours differ in three ways. Queries, keys and values are one
matrix, whose rows go by head. Label 0 is the blank, which is the last label there: rows of embedding and joint network
move by one. Convolutions of kernel 1 are matrices.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from colonnade.checkpoint.atomic_folder import read_json
from colonnade.config.speech import SpeechConfig
from colonnade.errors import CheckpointError
from colonnade.speech.subsampling import KERNEL, STRIDE

MODEL_TYPE = "nemotron_asr_streaming"
CONFIG, TOKENIZER, PROCESSOR, WEIGHTS = (
    "config.json", "tokenizer.json", "processor_config.json", "model.safetensors",
)  # fmt: skip
LOOKAHEADS = (13, 6, 1, 0)
"""Look-aheads within a segment that the published model was trained with [frames]."""
NORMS = ("norm_feed_forward1", "norm_self_att", "norm_conv", "norm_feed_forward2", "norm_out")
"""norm1 to norm5 of a block."""


def is_nemotron(folder: Path) -> bool:
    """Whether the folder has such a model."""
    return (folder / CONFIG).is_file() and read_json(folder / CONFIG).get("model_type") == MODEL_TYPE


def read_config(folder: Path) -> SpeechConfig:
    """The recogniser's config; raises CheckpointError for a model that ours cannot compute."""
    values = read_json(folder / CONFIG)
    encoder: Mapping[str, Any] = values.get("encoder_config") or {}
    default: dict[str, Any] = {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "intermediate_size": 4096,
        "hidden_act": "silu", "attention_bias": True, "convolution_bias": True, "conv_kernel_size": 9,
        "subsampling_factor": 8, "subsampling_conv_channels": 256, "num_mel_bins": 80,
        "subsampling_conv_kernel_size": KERNEL, "subsampling_conv_stride": STRIDE, "scale_input": True,
        "sliding_window": 71, "default_num_lookahead_tokens": 13,
    }  # fmt: skip
    own: dict[str, Any] = default | {key: value for key, value in encoder.items() if key in default}
    outer: dict[str, Any] = {
        "vocab_size": 1025, "decoder_hidden_size": 640, "num_decoder_layers": 2, "max_symbols_per_step": 10,
        "blank_token_id": 1024, "hidden_act": "relu",
    }  # fmt: skip
    outer |= {key: value for key, value in values.items() if key in outer}
    required = {
        "encoder_config.hidden_act": (own["hidden_act"], "silu"), "hidden_act": (outer["hidden_act"], "relu"),
        "encoder_config.subsampling_conv_kernel_size": (own["subsampling_conv_kernel_size"], KERNEL),
        "encoder_config.subsampling_conv_stride": (own["subsampling_conv_stride"], STRIDE),
        "blank_token_id": (outer["blank_token_id"], outer["vocab_size"] - 1),
    }  # fmt: skip
    for name, (found, needed) in required.items():
        if found != needed:
            raise CheckpointError(f"{folder / CONFIG}: {name} is {found!r}, and only {needed!r} is supported")
    if own["subsampling_factor"] not in (4, 8):
        raise CheckpointError(f"{folder / CONFIG}: subsampling_factor is {own['subsampling_factor']}; use 4 or 8")
    segments = {lookahead + 1 for lookahead in _lookaheads(folder)} | {own["default_num_lookahead_tokens"] + 1}
    return SpeechConfig(
        family="conformer", front_end="subsampling", pieces=_pieces(folder, outer["vocab_size"] - 1),
        layers=own["num_hidden_layers"], width=own["hidden_size"], heads=own["num_attention_heads"],
        ffn_width=own["intermediate_size"], block_bias=own["attention_bias"], conv_bias=own["convolution_bias"],
        conv_kernel=own["conv_kernel_size"], subsampling=own["subsampling_factor"], mels=own["num_mel_bins"],
        subsampling_channels=own["subsampling_conv_channels"], scale_input=own["scale_input"],
        joint_width=outer["decoder_hidden_size"], predictor_layers=outer["num_decoder_layers"], predictor_norm=False,
        letter_head=False, max_labels=outer["max_symbols_per_step"], left=own["sliding_window"] - 1, right=0,
        segment=own["default_num_lookahead_tokens"] + 1, segments=tuple(sorted(segments)),
    )  # fmt: skip


def _lookaheads(folder: Path) -> tuple[int, ...]:
    if not (folder / PROCESSOR).is_file():
        return LOOKAHEADS
    return tuple(read_json(folder / PROCESSOR).get("supported_num_lookahead_tokens") or LOOKAHEADS)


def _pieces(folder: Path, count: int) -> tuple[str, ...]:
    """The text of each label before the blank."""
    if not (folder / TOKENIZER).is_file():
        raise CheckpointError(f"{folder / TOKENIZER} is missing; complete the download")
    core = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    pieces = tuple(core.id_to_token(i) or "" for i in range(count))
    if not all(pieces):
        raise CheckpointError(f"{folder / TOKENIZER} has no token {pieces.index('')}, and the model has {count}")
    return pieces


def read_weights(folder: Path, config: SpeechConfig) -> dict[str, Tensor]:
    """All tensors by our names; raises CheckpointError if one is missing, unexpected or damaged."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no {WEIGHTS}; complete the download")
    try:
        theirs = {name: x for file in files for name, x in load_file(file).items()}
    except SafetensorError as why:
        raise CheckpointError(f"{folder}: the weights cannot be read: {why}; download them again") from None
    try:
        ours = _convert(theirs, config)
    except KeyError as missing:
        raise CheckpointError(f"{folder}: the weights lack {missing}; download them again") from None
    if theirs:
        raise CheckpointError(f"{folder}: the weights have an unknown tensor {sorted(theirs)[0]!r}; use another model")
    return ours


def _convert(theirs: dict[str, Tensor], config: SpeechConfig) -> dict[str, Tensor]:
    """Take each tensor out of ``theirs`` and rename it."""
    ours: dict[str, Tensor] = {}

    def move(old: str, new: str, *, bias: bool = True, matrix: bool = False) -> None:
        weight = theirs.pop(f"{old}.weight")
        ours[f"{new}.weight"] = weight.flatten(1) if matrix else weight
        if bias:
            ours[f"{new}.bias"] = theirs.pop(f"{old}.bias")

    move("encoder.subsampling.conv_in", "front_end.audio.first")
    for i in range(config.subsampling.bit_length() - 2):
        for kind in ("depthwise", "pointwise"):
            move(f"encoder.subsampling.layers.{i}.{kind}_conv", f"front_end.audio.{kind}.{i}")
    move("encoder.subsampling.linear", "front_end.audio.out")
    for i in range(config.layers):
        old, new = f"encoder.layers.{i}", f"encoder.blocks.{i}"
        for number in (1, 2):
            for theirs_name, ours_name in (("linear1", "up"), ("linear2", "down")):
                move(
                    f"{old}.feed_forward{number}.{theirs_name}",
                    f"{new}.ffn{number}.{ours_name}",
                    bias=config.block_bias,
                )
        for number, norm in enumerate(NORMS, 1):
            move(f"{old}.{norm}", f"{new}.norm{number}")
        for part in ("weight", "bias") if config.block_bias else ("weight",):
            parts = [theirs.pop(f"{old}.self_attn.{x}_proj.{part}").unflatten(0, (config.heads, -1)) for x in "qkv"]
            ours[f"{new}.attention.qkv.{part}"] = torch.stack(parts, 1).flatten(0, 2)
        move(f"{old}.self_attn.o_proj", f"{new}.attention.out", bias=config.block_bias)
        move(f"{old}.self_attn.relative_k_proj", f"{new}.attention.relative", bias=False)
        ours[f"{new}.attention.key_bias"] = theirs.pop(f"{old}.self_attn.bias_u")
        ours[f"{new}.attention.position_bias"] = theirs.pop(f"{old}.self_attn.bias_v")
        move(f"{old}.conv.pointwise_conv1", f"{new}.conv.expand", bias=config.conv_bias, matrix=True)
        move(f"{old}.conv.pointwise_conv2", f"{new}.conv.project", bias=config.conv_bias, matrix=True)
        move(f"{old}.conv.norm", f"{new}.conv.norm")
        ours[f"{new}.conv.depthwise"] = theirs.pop(f"{old}.conv.depthwise_conv.weight").flatten(1)
        if config.conv_bias:
            ours[f"{new}.conv.depthwise_bias"] = theirs.pop(f"{old}.conv.depthwise_conv.bias")
    move("encoder_projector", "out")
    ours["predictor.embed.weight"] = theirs.pop("decoder.embedding.weight").roll(1, 0)
    for i in range(config.predictor_layers):
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            ours[f"predictor.layers.{i}.{kind}_l0"] = theirs.pop(f"decoder.lstm.{kind}_l{i}")
    move("decoder.decoder_projector", "predictor.out")
    for part in ("weight", "bias"):
        ours[f"joint.{part}"] = theirs.pop(f"joint.head.{part}").roll(1, 0)
    return ours
