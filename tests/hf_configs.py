"""Random configs: any model that some family can express."""

from typing import Any

from hypothesis import strategies as st

from colonnade.checkpoint.hf.families import FAMILIES
from colonnade.config import ModelConfig, RopeScaling


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any causal model of any family; encoders have tests of their own."""
    family = draw(st.sampled_from([name for name in FAMILIES if "bert" not in name]))
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
        "vocab_size": draw(st.integers(1, 300)),
        "ffn_width": draw(st.integers(1, 99)),
        "context": draw(st.integers(32, 10_000)),
        "norm_eps": draw(st.floats(1e-8, 1e-2)),
        "activation": draw(st.sampled_from(["gelu", "gelu_tanh", "silu", "relu"])),
        "tied": draw(st.booleans()),
        "init_std": draw(st.floats(1e-3, 1)),
    }
    bias = draw(st.booleans())
    if family == "gpt2":
        fields |= {"positions": "learned", "norm": "layernorm", "gated": False}
        return ModelConfig(**fields, qkv_bias=True, out_bias=True, ffn_bias=True)
    if family == "llama":
        fields |= {"qkv_bias": bias, "out_bias": bias, "ffn_bias": draw(st.booleans())}
    if family == "qwen2":
        fields |= {"qkv_bias": True}
    if family == "qwen3":
        fields |= {"qk_norm": True, "qkv_bias": bias, "out_bias": bias}
    if family != "llama" and draw(st.booleans()):
        fields["window"] = draw(st.integers(1, 50))
        fields["window_from_layer"] = 0 if family == "mistral" else draw(st.integers(0, layers - 1))
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
