"""Converts a GGUF file's metadata to a :class:`ModelConfig`.

The keys (``llama.block_count`` and so on) are llama.cpp's. The tensors determine the rest: whether there are biases,
tied embeddings (no ``output.weight``), and Llama 3.1's frequency bands, which are a tensor of divisors. As with
config.json, an unknown key of the architecture is refused, whatever its value.
"""

import math
from typing import Any

import numpy as np

from colonnade.checkpoint.gguf.header import Header
from colonnade.checkpoint.hf.family import StrictKeys
from colonnade.config import ModelConfig, RopeScaling
from colonnade.errors import CheckpointError, ConfigError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
IGNORED_KEYS = frozenset({"vocab_size", "tensor_data_layout", "pooling_type"})
"""Sizes that the tensors have too, their order, and how llama.cpp pools the hidden states."""
UNSUPPORTED: dict[str, Any] = {
    "expert_count": 0, "expert_used_count": 0, "expert_shared_count": 0, "use_parallel_residual": False,
    "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attention.scale": 0.0, "logit_scale": 0.0,
    "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "rope.scaling.yarn_log_multiplier": 0.0,
}  # fmt: skip
"""Features that these architectures lack, with llama.cpp's value for "none"; only that value is accepted."""
ROPE_DIVISORS = "rope_freqs.weight"
"""The tensor of the values that divide the RoPE frequencies."""
LLAMA3_ORIGINAL_CONTEXT = 8192
"""Of all published Llama 3.1 to 3.3 models; the file contains only the resulting divisors, which are checked."""


class GGUFKeys(StrictKeys):
    """The keys of the file's architecture, and its tensors."""

    ignored, unsupported = IGNORED_KEYS, UNSUPPORTED
    remedy = "use the original checkpoint of the model"

    def __init__(self, header: Header, architecture: str):
        prefix = f"{architecture}."
        values = {key.removeprefix(prefix): value for key, value in header.values.items() if key.startswith(prefix)}
        super().__init__(values, str(header.path), prefix)
        self._tensors = header.tensors

    def number(self, name: str, default: float | None = None) -> float:
        """Reads a finite number: the shortest decimal with these 32 bits, 1e-5 and not 9.999999747378752e-06."""
        value = super().number(name, default)
        if not math.isfinite(value):
            raise self.refuse(name, "a number was expected")
        return float(str(np.float32(value))) if np.float32(value) == value else value

    def has(self, tensor: str) -> bool:
        """Whether the file contains ``tensor``."""
        return tensor in self._tensors

    def rows(self, tensor: str) -> int:
        """Returns the number of rows of ``tensor``."""
        if tensor not in self._tensors:
            raise CheckpointError(f"{self.file} lacks the tensor '{tensor}'; it is incomplete")
        return self._tensors[tensor].shape[0]


def config_from_header(header: Header, *, tied: bool, rope_divisors: np.ndarray | None) -> ModelConfig:
    """Converts the metadata of ``header``; ``rope_divisors`` are the values of the tensor :data:`ROPE_DIVISORS`.

    Raises :class:`CheckpointError` for an architecture or a choice that we do not support.
    """
    architecture = header.values.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path} contains a model of architecture {architecture!r}; "
            f"supported ones are {', '.join(ARCHITECTURES)}"
        )
    keys = GGUFKeys(header, architecture)
    try:
        fields = _gpt2(keys) if architecture == "gpt2" else _llama_like(keys, architecture, rope_divisors)
        keys.refuse_unknown()
        return ModelConfig(tied=tied, vocab_size=keys.rows("token_embd.weight"), **fields)
    except ConfigError as error:
        raise CheckpointError(f"{header.path}: {error}") from None


def _gpt2(keys: GGUFKeys) -> dict[str, Any]:
    return _sizes(keys) | {
        "family": "gpt2",
        "positions": "learned",
        "norm": "layernorm",
        "norm_eps": keys.number("attention.layer_norm_epsilon"),
        "activation": "gelu_tanh",  # ggml's gelu is the tanh form
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
    }


def _llama_like(keys: GGUFKeys, architecture: str, rope_divisors: np.ndarray | None) -> dict[str, Any]:
    sizes = _sizes(keys)
    width = keys.size("attention.key_length", sizes["width"] // sizes["heads"])
    keys.must_be("attention.value_length", width, "keys and values of different widths are not implemented")
    keys.must_be("rope.dimension_count", width, "only rotation of the whole head is implemented")
    window = keys.size("attention.sliding_window", 0, minimum=0) or None
    return sizes | {
        "family": "mistral" if architecture == "llama" and window else architecture,
        "head_width": width,
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys, rope_divisors, width),
        "qkv_bias": keys.has("blk.0.attn_q.bias"),
        "out_bias": keys.has("blk.0.attn_output.bias"),
        "ffn_bias": keys.has("blk.0.ffn_up.bias"),
        "qk_norm": keys.has("blk.0.attn_q_norm.weight"),
        "window": window,
    }


def _sizes(keys: GGUFKeys) -> dict[str, Any]:
    heads = keys.size("attention.head_count")
    return {
        "layers": keys.size("block_count"),
        "width": keys.size("embedding_length"),
        "heads": heads,
        "kv_heads": keys.size("attention.head_count_kv", heads),
        "ffn_width": keys.size("feed_forward_length"),
        "context": keys.size("context_length"),
        "causal": keys.flag("attention.causal", True),
    }


def _rope_scaling(keys: GGUFKeys, divisors: np.ndarray | None, width: int) -> RopeScaling | None:
    old = keys.number("rope.scale_linear", 1.0)
    kind, factor = keys.take("rope.scaling.type", "linear"), keys.number("rope.scaling.factor", old)
    if old not in (1.0, factor):
        raise keys.refuse("rope.scale_linear", f"'rope.scaling.factor' is {factor}; remove one of them")
    original = keys.size("rope.scaling.original_context_length", 0, minimum=0)
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    keys.take("rope.scaling.finetuned")
    if attention != 1.0 and kind != "yarn":
        raise keys.refuse(
            "rope.scaling.attn_factor", f"it is implemented only for 'rope.scaling.type' yarn, not {kind}"
        )
    if divisors is not None:
        if kind not in ("none", "linear") or factor != 1.0:
            raise keys.refuse("rope.scaling.type", f"scaling in addition to '{ROPE_DIVISORS}' is not implemented")
        return _llama3(keys, divisors, width)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn" and original:
        if factor <= 0:
            raise keys.refuse("rope.scaling.factor", "a number above 0 was expected")
        # llama.cpp multiplies its own attention factor by this one.
        attention_factor = None if attention == 1.0 else attention * (0.1 * math.log(factor) + 1.0)
        return RopeScaling(kind="yarn", factor=factor, original_context=original, attention_factor=attention_factor)
    raise keys.refuse("rope.scaling.type", "supported kinds: none, linear, yarn (with its original context)")


def _llama3(keys: GGUFKeys, divisors: np.ndarray, width: int) -> RopeScaling:
    """Recovers Llama 3.1's scaling from its divisors: the largest is the factor, which must imply the others."""
    factor = float(divisors.max())
    scaling = RopeScaling(kind="llama3", factor=factor, original_context=LLAMA3_ORIGINAL_CONTEXT)
    theta = keys.number("rope.freq_base", 10000.0) ** -(np.arange(0, width, 2) / width)
    rotations = LLAMA3_ORIGINAL_CONTEXT * theta / (2 * math.pi)
    band = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((rotations - scaling.low_freq_factor) / band, 0, 1)
    expected = 1 / ((1 - keep) / factor + keep)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise CheckpointError(
            f"{keys.file}: '{ROPE_DIVISORS}' scales the RoPE frequencies differently from Llama 3.1; "
            "use the original checkpoint, whose config.json describes it"
        )
    return scaling
