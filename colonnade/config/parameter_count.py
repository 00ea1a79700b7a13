"""Counts a model's parameters and the floating-point operations of a token, from its configuration alone."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colonnade.config.model import ModelConfig


def count_parameters(model: "ModelConfig") -> int:
    """Number of parameters, tied ones counted once."""
    d, f, h = model.width, model.ffn_width, model.head_width
    norm = d * (2 if model.norm == "layernorm" else 1)
    qkv = (model.heads + 2 * model.kv_heads) * h
    normed = 2 if model.qk_norm_over == "head" else model.heads + model.kv_heads
    matrices = _attention_matrices(model)
    attention = matrices + d * model.out_bias
    if model.latent:
        attention += model.latent.norm_and_bias_parameters(bias=model.qkv_bias)
    else:
        attention += qkv * model.qkv_bias + normed * h * model.qk_norm
    expert_layers = model.expert_layers
    encoder_experts = model.encoder.expert_layers if model.encoder and model.moe else 0
    ffn = ffn_parameters(model, f) * (model.layers - expert_layers + encoder_experts)
    if moe := model.moe:
        each = moe.stored_experts * ffn_parameters(model, moe.ffn_width)
        each += ffn_parameters(model, moe.shared_width) * bool(moe.shared_width) + d * moe.shared_gate
        each += moe.router_parameters(d)
        ffn += each * expert_layers
    outside = model.vocab_size * d * (1 if model.tied else 2)
    outside += norm * ((model.norm_order == "pre") + model.embed_norm) + model.segments * d
    outside += model.context * d if model.positions == "learned" else 0
    square = d * d + d
    outside += (square + norm + model.vocab_size) * model.has_transform + square * model.has_pooler
    outside += (d + 1) * {"pretraining": 2, "spans": 2, "classes": model.classes}.get(model.task_head, 0)
    if model.relative_positions:
        outside += model.relative_positions.buckets * model.heads * (1 if model.encoder is None else 2)
    cross = 0
    if encoder := model.encoder:
        # Queries and outputs of each decoder layer's cross attention, its norm, and its share of the bridge.
        cross = matrices + qkv * model.qkv_bias + d * model.out_bias + norm
        hidden = encoder.ffn_width or f
        outside += encoder.layers * (attention + 2 * norm) + norm
        outside += (encoder.layers - encoder_experts) * ffn_parameters(model, hidden)
        if encoder.reads == "audio":
            outside += 3 * d * (encoder.mels + d) + 2 * d + encoder.context * d
    return model.layers * (attention + 2 * norm + cross) + ffn + outside


def _attention_matrices(model: "ModelConfig") -> int:
    """Parameters in the attention matrices of one layer."""
    if model.latent:
        return model.latent.projection_parameters(model.width, model.heads, model.head_width)
    return 2 * model.width * (model.heads + model.kv_heads) * model.head_width


def ffn_parameters(model: "ModelConfig", hidden: int) -> int:
    """Parameters of a feed-forward network with ``hidden`` hidden units."""
    return (2 + model.gated) * model.width * hidden + model.ffn_bias * ((1 + model.gated) * hidden + model.width)


def flops_per_token(model: "ModelConfig", sequence: int, *, causal: bool) -> float:
    """Floating-point operations to train on one token: :meth:`ModelConfig.flops_per_token`."""
    # Hidden units that process a token, in all layers.
    expert_layers = 0 if model.moe is None else model.moe.count_expert_layers(model.layers)
    hidden = (model.layers - expert_layers) * model.ffn_width
    if model.moe:
        hidden += expert_layers * (model.moe.active * model.moe.ffn_width + model.moe.shared_width)
    ffn = model.width * (2 + model.gated) * hidden
    attended = min(sequence, model.window) if model.window else sequence
    widths = model.head_width + (model.latent.v_width if model.latent else model.head_width)
    scores = attended * model.heads * widths * (0.5 if causal and model.causal else 1.0)
    head = model.width * model.vocab_size if model.causal or model.predicts_masked else 0
    return 3 * 2 * (model.layers * (_attention_matrices(model) + scores) + ffn + head)
