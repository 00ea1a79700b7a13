"""Random configs of all model families."""

from typing import Any

from hypothesis import strategies as st

from colonnade.checkpoint.hf import FAMILIES
from colonnade.checkpoint.hf.experts import expert_layers
from colonnade.config import LatentConfig, ModelConfig, MoeConfig, RopeScaling, RouterConfig


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any decoder of any family, causal or not; BERT and encoder–decoders have their own tests."""
    others = ("bert", "megatron-bert", "t5", "whisper")
    family = draw(st.sampled_from([name for name in FAMILIES if name not in others]))
    layers, kv_heads = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    heads = kv_heads if family == "gpt2" else kv_heads * draw(st.integers(1, 3))
    head_width = 2 * draw(st.integers(1, 5))
    fields: dict[str, Any] = {
        "family": family,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_width": head_width,
        # transformers wants a multiple of the heads in "llama", whatever the width of a head.
        "width": heads * (head_width if family == "gpt2" else draw(st.integers(1, 9))),
        "vocab_size": draw(st.integers(2, 300)),  # transformers pads with token 1 by default
        "ffn_width": draw(st.integers(1, 99)),
        "context": draw(st.integers(32, 10_000)),
        "norm_eps": draw(st.floats(1e-8, 1e-2)),
        "activation": draw(st.sampled_from(["gelu", "gelu_tanh", "silu", "relu"])),
        "tied": draw(st.booleans()),
        "init_std": draw(st.floats(1e-3, 1)),
        "causal": draw(st.sampled_from([True, True, True, False])),
    }
    bias = draw(st.booleans())
    if family == "gpt2":
        fields |= {"positions": "learned", "norm": "layernorm", "gated": False}
        return ModelConfig(**fields, qkv_bias=True, out_bias=True, ffn_bias=True)
    if family.startswith("deepseek"):
        _latent(draw, fields, bias=bias)
    if family in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe") or family.startswith("deepseek"):
        fields["moe"] = _experts(draw, fields)
    if family == "olmoe":
        fields |= {"width": heads * head_width, "qk_norm": True, "qk_norm_over": "all", "qkv_bias": bias}
        fields |= {"out_bias": bias, "qkv_clip": draw(st.none() | st.floats(0.1, 5))}
    if family == "qwen2_moe":
        fields |= {"qkv_bias": bias}
    if family == "llama":
        fields |= {"qkv_bias": bias, "out_bias": bias, "ffn_bias": draw(st.booleans())}
    if family == "qwen2":
        fields |= {"qkv_bias": True}
    if family in ("qwen3", "qwen3_moe"):
        fields |= {"qk_norm": True, "qkv_bias": bias, "out_bias": bias}
    if family in ("mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe") and fields["causal"] and draw(st.booleans()):
        fields["window"] = draw(st.integers(1, 50))
        fields["window_from_layer"] = draw(st.integers(0, layers - 1)) if family in ("qwen2", "qwen3") else 0
    kind = draw(st.sampled_from([None, "linear", "llama3", "yarn"]))
    if kind:
        scaling: dict[str, Any] = {"kind": kind, "factor": draw(st.floats(1, 64))}
        if kind != "linear":
            scaling["original_context"] = draw(st.integers(16, fields["context"]))
            fields["context"] += 1  # an original context equal to the whole is Qwen's shorthand, tested below
        if kind == "yarn":
            scaling |= {"truncate": draw(st.booleans()), "attention_factor": draw(st.none() | st.floats(0.1, 2))}
        fields["rope_scaling"] = RopeScaling(**scaling)
    return ModelConfig(**fields, rope_theta=draw(st.floats(10, 1e7)))


def _latent(draw: st.DrawFn, fields: dict[str, Any], *, bias: bool) -> None:
    rope_width, plain = 2 * draw(st.integers(1, 4)), draw(st.integers(1, 5))
    fields["latent"] = LatentConfig(
        kv_rank=draw(st.integers(1, 9)),
        q_rank=draw(st.integers(0, 9)),
        rope_width=rope_width,
        v_width=draw(st.integers(1, plain + rope_width)),
    )
    fields |= {"kv_heads": fields["heads"], "head_width": plain + rope_width, "qkv_bias": bias, "out_bias": bias}


def _experts(draw: st.DrawFn, fields: dict[str, Any]) -> MoeConfig:
    family, layers = fields["family"], fields["layers"]
    per_group, groups, kept = draw(st.integers(2, 3)), draw(st.integers(1, 3)), 1
    if family.startswith("deepseek"):
        kept = draw(st.integers(1, groups))
    experts = per_group * groups
    active = draw(st.integers(1, per_group * kept))
    divided = family != "deepseek_v2" and (family == "mixtral" or draw(st.booleans()))
    router: dict[str, Any] = {"normalise": divided, "normalise_single": divided and active == 1}
    own: dict[str, Any] = {"balance": "choices", "balance_over": "model", "balance_weight": draw(st.floats(1e-4, 1))}
    if family.startswith("deepseek"):
        router |= {"groups": groups, "groups_kept": kept, "scale": draw(st.floats(0.1, 20))}
        own |= {"first_k_dense_replace": draw(st.integers(0, layers))}
    if family == "deepseek_v2":
        router |= {"group_score": "max" if groups > 1 else "top2"}
        own |= {"balance": "switch", "balance_over": "layer", "balance_weight": 0.001}
    if family == "deepseek_v3":
        router |= {"kind": "sigmoid"}
        own |= {"balance": "none", "balance_over": "layer", "bias_rate": 0.001, "balance_weight": 0.001}
    if family.startswith("qwen"):
        own |= expert_layers(draw(st.integers(1, 3)), draw(st.lists(st.integers(0, layers - 1), unique=True)), layers)
    width = fields["ffn_width"] if family in ("mixtral", "olmoe") else draw(st.integers(1, 20))
    if family == "olmoe":
        own |= {"z_weight": 0.001}
    if family == "qwen2_moe":
        own |= {"shared_width": draw(st.integers(1, 20)), "shared_gate": True}
    if family.startswith("deepseek"):
        own |= {"shared_width": width * draw(st.integers(1, 2))}
    return MoeConfig(experts=experts, active=active, ffn_width=width, router=RouterConfig(**router), **own)
