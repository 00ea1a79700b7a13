"""NLLB-MoE (arXiv 2207.04672): an encoder–decoder that translates between 202 languages, with experts in both stacks.

    pre-norm, LayerNorm, biases, ReLU; embeddings · √D + sinusoidal positions from 2 on, no learned ones
    experts in block i where (i + 1) mod step = 0, two per token: w = p / Σ p of the two, times 1 − output_mask
    source: language, tokens, </s>        target: </s>, language, tokens, </s>

No choice is dropped: the published models evaluate with a capacity of all tokens. transformers 5.24 computes another
model: it takes a one-hot mask for expert numbers and makes it one-hot again, so only experts 0 and 1 ever run. Our
tests compare with its router and all experts (tests/parity/test_nllb_parity.py).
"""

from typing import Any

from colonnade.checkpoint.hf.experts import PerExpert
from colonnade.checkpoint.hf.family import ConfigKeys, Family, activation_from_hf, activation_to_hf
from colonnade.checkpoint.weight_mapping import BridgeKV, MappingTable, ParamMapping, SplitQKV, weight_and_bias
from colonnade.config import EncoderConfig, ModelConfig, MoeConfig, RouterConfig

_ENCODER, _DECODER = "model.encoder.layers.{i}.", "model.decoder.layers.{i}."


def _stack(ours: str, theirs: str) -> MappingTable:
    attention, ffn = f"{theirs}self_attn.", f"{theirs}ffn."
    return {
        **weight_and_bias(f"{ours}.norm1", f"{theirs}self_attn_layer_norm"),
        **weight_and_bias(f"{ours}.attention.qkv", *(f"{attention}{part}_proj" for part in "qkv"), mapping=SplitQKV),
        **weight_and_bias(f"{ours}.attention.out", f"{attention}out_proj"),
        **weight_and_bias(f"{ours}.norm2", f"{theirs}ff_layer_norm"),
        **weight_and_bias(f"{ours}.ffn.up", f"{ffn}fc1"),
        **weight_and_bias(f"{ours}.ffn.down", f"{ffn}fc2"),
        f"{ours}.ffn.router.gates.0.weight": ParamMapping(f"{ffn}router.classifier.weight"),
        f"{ours}.ffn.experts.up": PerExpert(f"{ffn}experts.expert_{{e}}.fc1.weight"),
        f"{ours}.ffn.experts.up_bias": PerExpert(f"{ffn}experts.expert_{{e}}.fc1.bias"),
        f"{ours}.ffn.experts.down": PerExpert(f"{ffn}experts.expert_{{e}}.fc2.weight", transposed=True),
        f"{ours}.ffn.experts.down_bias": PerExpert(f"{ffn}experts.expert_{{e}}.fc2.bias"),
    }


TABLE: MappingTable = {
    "embed.tokens.weight": ParamMapping("model.shared.weight"),
    **_stack("encoder_blocks.{i}", _ENCODER),
    **_stack("blocks.{i}", _DECODER),
    **weight_and_bias("blocks.{i}.norm_cross", f"{_DECODER}cross_attention_layer_norm"),
    **weight_and_bias("blocks.{i}.cross.q", f"{_DECODER}cross_attention.q_proj"),
    **weight_and_bias("blocks.{i}.cross.out", f"{_DECODER}cross_attention.out_proj"),
    **weight_and_bias(
        "bridge.kv", f"{_DECODER}cross_attention.k_proj", f"{_DECODER}cross_attention.v_proj", mapping=BridgeKV
    ),
    **weight_and_bias("encoder_norm", "model.encoder.layer_norm"),
    **weight_and_bias("norm", "model.decoder.layer_norm"),
    "unembed.weight": ParamMapping("lm_head.weight"),
}
TRAINING = (
    "activation_dropout",
    "batch_prioritized_routing",
    "decoder_layerdrop",
    "dropout",
    "encoder_layerdrop",
    "expert_capacity",
    "normalize_router_prob_before_dropping",
    "router_ignore_padding_tokens",
    "router_type",
)
"""Settings of training, and of a capacity that drops nothing in evaluation."""


def _from_hf(keys: ConfigKeys) -> ModelConfig:
    keys.ignore(TRAINING)
    keys.must_be("is_encoder_decoder", True, "only the encoder–decoder is implemented")
    keys.must_be("router_bias", False, "a router bias is not implemented for this family")
    keys.must_be("router_dtype", "float32", "the router computes in float32")
    keys.must_be("second_expert_policy", "all", "a random second expert is not implemented for this family")
    keys.must_be("moe_eval_capacity_token_fraction", 1.0, "a capacity in evaluation is not implemented")
    heads, hidden = keys.size("decoder_attention_heads", 16), keys.size("decoder_ffn_dim", 4096)
    keys.must_agree("encoder_attention_heads", "decoder_attention_heads", heads)
    keys.must_agree("encoder_ffn_dim", "decoder_ffn_dim", hidden)
    context = keys.size("max_position_embeddings", 1024)
    steps = {stack: keys.size(f"{stack}_sparse_step", 4, minimum=0) for stack in ("encoder", "decoder")}
    layers = {stack: keys.size(f"{stack}_layers", 12) for stack in ("encoder", "decoder")}
    keys.must_agree("num_hidden_layers", "encoder_layers", layers["encoder"])
    for stack, step in steps.items():
        if not 0 < step <= layers[stack]:
            raise keys.refuse(f"{stack}_sparse_step", f"a stack of {layers[stack]} blocks needs experts")
    return ModelConfig(
        family="nllb-moe",
        vocab_size=keys.size("vocab_size"),
        layers=layers["decoder"],
        width=keys.size("d_model"),
        heads=heads,
        ffn_width=hidden,
        context=context,
        positions="sinusoidal",
        norm="layernorm",
        activation=activation_from_hf(keys, "activation_function", "relu"),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        scale_embedding=keys.flag("scale_embedding", True),
        init_std=keys.number("init_std", 0.02),
        tied=keys.flag("tie_word_embeddings", True),
        encoder=EncoderConfig(
            layers=layers["encoder"],
            context=context,
            start_token=keys.size("decoder_start_token_id", 2, minimum=0),
            languages=True,
            first_k_dense_replace=steps["encoder"] - 1,
            layer_freq=steps["encoder"],
        ),
        moe=MoeConfig(
            experts=keys.size("num_experts", 128),
            active=2,
            ffn_width=hidden,
            first_k_dense_replace=steps["decoder"] - 1,
            layer_freq=steps["decoder"],
            output_mask=keys.number("moe_token_dropout", 0.2),
            router=RouterConfig(kind="softmax", normalise=True),
            balance="gshard",
            balance_weight=keys.number("router_aux_loss_coef", 0.001),
            z_weight=keys.number("router_z_loss_coef", 0.001),
        ),
    )


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    encoder, moe = config.encoder, config.moe
    assert encoder is not None, "NLLB-MoE has an encoder"
    assert moe is not None, "NLLB-MoE has experts"
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.width,
        "encoder_layers": encoder.layers,
        "decoder_layers": config.layers,
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.ffn_width,
        "decoder_ffn_dim": config.ffn_width,
        "max_position_embeddings": config.context,
        "activation_function": activation_to_hf(config.activation),
        "scale_embedding": config.scale_embedding,
        "init_std": config.init_std,
        "tie_word_embeddings": config.tied,
        "decoder_start_token_id": encoder.start_token,
        "is_encoder_decoder": True,
        "encoder_sparse_step": encoder.layer_freq,
        "decoder_sparse_step": moe.layer_freq,
        "num_experts": moe.experts,
        "moe_token_dropout": moe.output_mask,
        "router_bias": False,
        "router_dtype": "float32",
        "router_aux_loss_coef": moe.balance_weight,
        "router_z_loss_coef": moe.z_weight,
        "second_expert_policy": "all",
        "moe_eval_capacity_token_fraction": 1.0,
    }


NLLB_MOE = Family(
    "nllb-moe", "NllbMoeForConditionalGeneration", "model.", TABLE, _from_hf, _to_hf,
    r"model\.(encoder|decoder)\.embed_positions\.weights",
    duplicates={
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
    },
)  # fmt: skip
