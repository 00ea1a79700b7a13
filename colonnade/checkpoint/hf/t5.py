"""T5 (arXiv 1910.10683) and T5 1.1: an encoder–decoder with relative position biases, RMSNorm and no biases.

    v1.0    ReLU; the output projection is the embedding, and the last hidden state is multiplied by D^-½
    v1.1    gated GELU; a separate output projection, no factor

Transformers 5 writes ``tie_word_embeddings: true`` for both: its factor is ``scale_decoder_outputs``, and older files
have the factor where ``tie_word_embeddings`` is not false. Whether the projection is tied is decided by the tensors:
untied if ``lm_head.weight`` is there and differs from the embedding. Each stack's table of relative positions is stored
under its first layer. The start of a target is the padding token, 0.
"""

from typing import Any

from torch import Tensor

from colonnade.checkpoint.hf.family import ACTIVATIONS, ConfigKeys, Family, activation_to_hf
from colonnade.checkpoint.weight_mapping import (
    Box,
    BridgeKV,
    MappingTable,
    ParamMapping,
    Shape,
    SplitQKV,
    TensorSource,
)
from colonnade.config import EncoderConfig, ModelConfig, RelativePositions


class ByGate(ParamMapping):
    """A parameter whose name is ``names[gated]``."""

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """One tensor of our shape."""
        return {self.names[config.gated]: shape}

    def read(self, source: TensorSource, box: Box, config: ModelConfig) -> Tensor:
        """Reads a box."""
        return source.read(self.names[config.gated], box)

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Converts to one tensor."""
        return {self.names[config.gated]: parameter.contiguous()}


_ENCODER, _DECODER = "encoder.block.{i}.layer.", "decoder.block.{i}.layer."
_PARTS = ("q", "k", "v")


def _stack(ours: str, theirs: str) -> MappingTable:
    """Mappings of one stack's blocks without the feed-forward part."""
    qkv = [f"{theirs}0.SelfAttention.{part}.weight" for part in _PARTS]
    return {
        f"{ours}.norm1.weight": ParamMapping(f"{theirs}0.layer_norm.weight"),
        f"{ours}.attention.qkv.weight": SplitQKV(*qkv),
        f"{ours}.attention.out.weight": ParamMapping(f"{theirs}0.SelfAttention.o.weight"),
    }


STACKS = {"encoder_blocks.{i}": f"{_ENCODER}1.", "blocks.{i}": f"{_DECODER}2."}
"""Our prefix of each stack's blocks, and theirs of its feed-forward parts."""


def _feed_forward(ours: str, theirs: str) -> MappingTable:
    return {
        f"{ours}.ffn.up.weight": ByGate(f"{theirs}DenseReluDense.wi.weight", f"{theirs}DenseReluDense.wi_1.weight"),
        f"{ours}.ffn.gate.weight": ParamMapping(f"{theirs}DenseReluDense.wi_0.weight"),
        f"{ours}.ffn.down.weight": ParamMapping(f"{theirs}DenseReluDense.wo.weight"),
    }


COMMON_TABLE: MappingTable = {
    "embed.tokens.weight": ParamMapping("shared.weight"),
    **_stack("encoder_blocks.{i}", _ENCODER),
    **_stack("blocks.{i}", _DECODER),
    **{f"{ours}.norm2.weight": ParamMapping(f"{theirs}layer_norm.weight") for ours, theirs in STACKS.items()},
    "blocks.{i}.norm_cross.weight": ParamMapping(f"{_DECODER}1.layer_norm.weight"),
    "blocks.{i}.cross.q.weight": ParamMapping(f"{_DECODER}1.EncDecAttention.q.weight"),
    "blocks.{i}.cross.out.weight": ParamMapping(f"{_DECODER}1.EncDecAttention.o.weight"),
    "bridge.kv.weight": BridgeKV(
        "decoder.block.{i}.layer.1.EncDecAttention.k.weight", "decoder.block.{i}.layer.1.EncDecAttention.v.weight"
    ),
    "relative.weight": ParamMapping("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    "encoder_relative.weight": ParamMapping("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    "encoder_norm.weight": ParamMapping("encoder.final_layer_norm.weight"),
    "norm.weight": ParamMapping("decoder.final_layer_norm.weight"),
    "unembed.weight": ParamMapping("lm_head.weight"),
}
"""All of a T5 but the feed-forward parts."""
_TABLE: MappingTable = {
    **COMMON_TABLE, **{k: v for ours, theirs in STACKS.items() for k, v in _feed_forward(ours, theirs).items()}
}  # fmt: skip


def common_from_hf(keys: ConfigKeys) -> dict[str, Any]:
    """The fields that T5 and Switch Transformers have in common, with an encoder that may be completed."""
    keys.must_be("is_encoder_decoder", True, "only the encoder–decoder is implemented")
    keys.must_be("is_decoder", False, "only the encoder–decoder is implemented")
    for training in ("dropout_rate", "initializer_factor"):
        keys.take(training)
    layers, context = keys.size("num_layers", 6), keys.size("n_positions", 512)
    start = keys.size("decoder_start_token_id", 0, minimum=0, null=0)
    return {
        "vocab_size": keys.size("vocab_size"),
        "layers": keys.size("num_decoder_layers", layers, null=layers),
        "width": keys.size("d_model"),
        "heads": keys.size("num_heads"),
        "head_width": keys.size("d_kv"),
        "ffn_width": keys.size("d_ff"),
        "context": context,
        "norm_eps": keys.number("layer_norm_epsilon", 1e-6),
        "positions": "none",
        "relative_positions": RelativePositions(
            buckets=keys.size("relative_attention_num_buckets", 32),
            distance=keys.size("relative_attention_max_distance", 128),
        ),
        "score_scale": 1.0,
        "encoder": EncoderConfig(layers=layers, context=context, start_token=start),
    }


def _from_hf(keys: ConfigKeys) -> ModelConfig:
    fields = common_from_hf(keys)
    act = keys.take("feed_forward_proj", "relu")
    gated, name = act.startswith("gated-") if isinstance(act, str) else False, str(act).removeprefix("gated-")
    if name not in ACTIVATIONS:
        raise keys.refuse("feed_forward_proj", f"known activations are {', '.join(ACTIVATIONS)}, and gated- ones")
    activation = "gelu_tanh" if act == "gated-gelu" else ACTIVATIONS[name]
    keys.must_agree("is_gated_act", "feed_forward_proj", gated)
    keys.must_agree("dense_act_fn", "feed_forward_proj", "gelu_new" if act == "gated-gelu" else name)
    tied = keys.flag("tie_word_embeddings", True)
    scaled = keys.flag("scale_decoder_outputs", tied)
    return ModelConfig(
        family="t5", **fields, activation=activation, gated=gated, scale_decoder_outputs=scaled, tied=tied
    )


def common_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The inverse of :func:`common_from_hf`."""
    encoder, near = config.encoder, config.relative_positions
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.width,
        "d_kv": config.head_width,
        "d_ff": config.ffn_width,
        "num_layers": encoder.layers if encoder else config.layers,
        "num_decoder_layers": config.layers,
        "num_heads": config.heads,
        "n_positions": config.context,
        "relative_attention_num_buckets": near.buckets if near else 32,
        "relative_attention_max_distance": near.distance if near else 128,
        "layer_norm_epsilon": config.norm_eps,
        "is_encoder_decoder": True,
        "decoder_start_token_id": encoder.start_token if encoder else 0,
        "pad_token_id": 0,
    }


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    activation = activation_to_hf(config.activation)
    if config.gated:
        activation = "gated-gelu" if config.activation == "gelu_tanh" else f"gated-{activation}"
    return common_to_hf(config) | {
        "feed_forward_proj": activation,
        # transformers reads the factor from this key alone, and the tie from the tensors.
        "tie_word_embeddings": config.scale_decoder_outputs,
        "scale_decoder_outputs": config.scale_decoder_outputs,
    }


OLD_BUFFERS = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
"""Stored by early releases, in cross attention that has no relative positions."""
DUPLICATES = {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"}
T5 = Family(
    "t5", "T5ForConditionalGeneration", "", _TABLE, _from_hf, _to_hf, OLD_BUFFERS, DUPLICATES, tied_by_values=True
)
