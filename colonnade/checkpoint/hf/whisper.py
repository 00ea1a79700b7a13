"""Whisper (arXiv 2212.04356): an encoder of spectrograms, LayerNorm, GELU, biases everywhere except on keys.

Our biases of keys are read as 0 and not written: they cancel in the softmax. Encoder positions are stored sinusoids.
"""

from typing import Any

from colonnade.checkpoint.ct2 import whisper_config
from colonnade.checkpoint.hf.family import ConfigKeys, Family, activation_from_hf
from colonnade.checkpoint.weight_mapping import (
    BridgeKV,
    MappingTable,
    ParamMapping,
    SplitQKV,
    SplitQKVWithoutKeyBias,
    weight_and_bias,
)
from colonnade.config import EncoderConfig, ModelConfig

_ENCODER, _DECODER = "model.encoder.layers.{i}.", "model.decoder.layers.{i}."


def _stack(ours: str, theirs: str) -> MappingTable:
    attention = f"{theirs}self_attn."
    return {
        **weight_and_bias(f"{ours}.norm1", f"{theirs}self_attn_layer_norm"),
        f"{ours}.attention.qkv.weight": SplitQKV(*(f"{attention}{part}_proj.weight" for part in "qkv")),
        f"{ours}.attention.qkv.bias": SplitQKVWithoutKeyBias(*(f"{attention}{part}_proj.bias" for part in "qv")),
        **weight_and_bias(f"{ours}.attention.out", f"{attention}out_proj"),
        **weight_and_bias(f"{ours}.norm2", f"{theirs}final_layer_norm"),
        **weight_and_bias(f"{ours}.ffn.up", f"{theirs}fc1"),
        **weight_and_bias(f"{ours}.ffn.down", f"{theirs}fc2"),
    }


TABLE: MappingTable = {
    "embed.tokens.weight": ParamMapping("model.decoder.embed_tokens.weight"),
    "embed.positions.weight": ParamMapping("model.decoder.embed_positions.weight"),
    "front_end.positions": ParamMapping("model.encoder.embed_positions.weight"),
    **weight_and_bias("front_end.conv1", "model.encoder.conv1"),
    **weight_and_bias("front_end.conv2", "model.encoder.conv2"),
    **_stack("encoder_blocks.{i}", _ENCODER),
    **_stack("blocks.{i}", _DECODER),
    **weight_and_bias("blocks.{i}.norm_cross", f"{_DECODER}encoder_attn_layer_norm"),
    **weight_and_bias("blocks.{i}.cross.q", f"{_DECODER}encoder_attn.q_proj"),
    **weight_and_bias("blocks.{i}.cross.out", f"{_DECODER}encoder_attn.out_proj"),
    "bridge.kv.weight": BridgeKV(f"{_DECODER}encoder_attn.k_proj.weight", f"{_DECODER}encoder_attn.v_proj.weight"),
    "bridge.kv.bias": BridgeKV(f"{_DECODER}encoder_attn.v_proj.bias"),
    **weight_and_bias("encoder_norm", "model.encoder.layer_norm"),
    **weight_and_bias("norm", "model.decoder.layer_norm"),
    "unembed.weight": ParamMapping("proj_out.weight"),
}
_TRAINING = (
    "activation_dropout",
    "apply_spec_augment",
    "classifier_proj_size",
    "decoder_layerdrop",
    "dropout",
    "encoder_layerdrop",
    "mask_feature_length",
    "mask_feature_min_masks",
    "mask_feature_prob",
    "mask_time_length",
    "mask_time_min_masks",
    "mask_time_prob",
    "median_filter_width",
    "use_weighted_layer_sum",
    "num_hidden_layers",
)
"""Settings of training and of other heads."""


def _from_hf(keys: ConfigKeys) -> ModelConfig:
    keys.ignore(_TRAINING)
    keys.must_be("is_encoder_decoder", True, "only the encoder–decoder is implemented")
    keys.must_be("scale_embedding", False, "scaled embeddings are not implemented")
    heads = keys.size("decoder_attention_heads")
    keys.must_agree("encoder_attention_heads", "decoder_attention_heads", heads)
    activation_from_hf(keys, "activation_function", "gelu")
    keys.must_be("activation_function", "gelu", "Whisper's front end has GELU")
    ffn_width, encoder_ffn_width = keys.size("decoder_ffn_dim"), keys.size("encoder_ffn_dim")
    return whisper_config(
        vocab_size=keys.size("vocab_size"),
        layers=keys.size("decoder_layers"),
        width=keys.size("d_model"),
        heads=heads,
        ffn_width=ffn_width,
        context=keys.size("max_target_positions", 448),
        init_std=keys.number("init_std", 0.02),
        encoder=EncoderConfig(
            layers=keys.size("encoder_layers"),
            ffn_width=0 if encoder_ffn_width == ffn_width else encoder_ffn_width,
            context=keys.size("max_source_positions", 1500),
            reads="audio",
            mels=keys.size("num_mel_bins", 80),
            start_token=keys.size("decoder_start_token_id", 50257, minimum=0),
        ),
    ).replace(tied=keys.flag("tie_word_embeddings", True))


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    encoder = config.encoder
    assert encoder is not None, "Whisper has an encoder"
    return {
        "vocab_size": config.vocab_size,
        "decoder_layers": config.layers,
        "d_model": config.width,
        "decoder_attention_heads": config.heads,
        "encoder_attention_heads": config.heads,
        "decoder_ffn_dim": config.ffn_width,
        "encoder_ffn_dim": encoder.ffn_width or config.ffn_width,
        "encoder_layers": encoder.layers,
        "max_target_positions": config.context,
        "max_source_positions": encoder.context,
        "num_mel_bins": encoder.mels,
        "decoder_start_token_id": encoder.start_token,
        "activation_function": "gelu",
        "init_std": config.init_std,
        "is_encoder_decoder": True,
        "tie_word_embeddings": config.tied,
    }


WHISPER = Family(
    "whisper", "WhisperForConditionalGeneration", "model.", TABLE, _from_hf, _to_hf, "(?!)"
)  # fmt: skip
