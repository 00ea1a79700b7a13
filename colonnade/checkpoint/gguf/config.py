"""A GGUF file's metadata as a :class:`ModelConfig`.

The keys (``llama.block_count`` and so on) are llama.cpp's. What they leave out, the tensors say: a bias is there or
not, an absent ``output.weight`` means tied embeddings, and Llama 3.1's frequency bands are a tensor of divisors. As
with config.json, a key of the architecture that we do not know is refused, whatever its value.
"""

import math
from typing import Any

import numpy as np

from colonnade.checkpoint.gguf.header import Header
from colonnade.config import ModelConfig, RopeScaling
from colonnade.errors import CheckpointError, ConfigError

FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")
HARMLESS = frozenset({"vocab_size", "tensor_data_layout", "pooling_type"})
"""The tensors' own sizes, a name of their order, and how llama.cpp makes one embedding of the hidden states."""
ABSENT: dict[str, Any] = {
    "expert_count": 0, "expert_used_count": 0, "expert_shared_count": 0, "use_parallel_residual": False,
    "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attention.scale": 0.0, "logit_scale": 0.0,
    "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "rope.scaling.yarn_log_multiplier": 0.0,
}  # fmt: skip
"""Features that these architectures lack: only the value by which llama.cpp means "none" is accepted."""
ROPE_DIVISORS = "rope_freqs.weight"
LLAMA3_ORIGINAL_CONTEXT = 8192
"""All published Llama 3.1 to 3.3 models; the file holds only the resulting divisors, which are checked."""


def config_of(header: Header, *, tied: bool, rope_divisors: np.ndarray | None) -> ModelConfig:
    """The model that ``header`` describes; ``rope_divisors`` are the values of the tensor of that name.

    Raises :class:`CheckpointError` for an architecture or a choice that we cannot express.
    """
    architecture = header.values.get("general.architecture")
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"{header.path} holds a model of architecture {architecture!r}; known ones are {', '.join(FAMILIES)}"
        )
    keys = _Keys(header, architecture)
    try:
        fields = _gpt2(keys) if architecture == "gpt2" else _llama_line(keys, architecture, rope_divisors)
        keys.finish()
        return ModelConfig(tied=tied, vocab_size=keys.rows("token_embd.weight"), **fields)
    except ConfigError as error:
        raise CheckpointError(f"{header.path}: {error}") from None


def _gpt2(keys: "_Keys") -> dict[str, Any]:
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


def _llama_line(keys: "_Keys", architecture: str, rope_divisors: np.ndarray | None) -> dict[str, Any]:
    sizes = _sizes(keys)
    width = keys.size("attention.key_length", sizes["width"] // sizes["heads"])
    keys.must_be("attention.value_length", width, "keys and values of different widths are not implemented")
    keys.must_be("rope.dimension_count", width, "only rotation of the whole head is implemented")
    window = keys.size("attention.sliding_window", 0) or None
    return sizes | {
        "family": "mistral" if architecture == "llama" and window else architecture,
        "head_width": width,
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(keys, rope_divisors, width),
        "qkv_bias": keys.has("blk.0.attn_q.bias"),
        "out_bias": keys.has("blk.0.attn_output.bias"),
        "ffn_bias": keys.has("blk.0.ffn_up.bias"),
        "qk_norm": keys.has("blk.0.attn_q_norm.weight"),
        "window": window,
    }


def _sizes(keys: "_Keys") -> dict[str, Any]:
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


def _scaling(keys: "_Keys", divisors: np.ndarray | None, width: int) -> RopeScaling | None:
    old = keys.number("rope.scale_linear", 1.0)
    kind, factor = keys.take("rope.scaling.type", "linear"), keys.number("rope.scaling.factor", old)
    if old not in (1.0, factor):
        raise keys.refuse("rope.scale_linear", f"'rope.scaling.factor' is {factor}; remove one of them")
    original = keys.size("rope.scaling.original_context_length", 0)
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    keys.take("rope.scaling.finetuned")
    if attention != 1.0 and kind != "yarn":
        raise keys.refuse("rope.scaling.attn_factor", f"it is implemented for 'rope.scaling.type' yarn, and not {kind}")
    if divisors is not None:
        if kind not in ("none", "linear") or factor != 1.0:
            raise keys.refuse("rope.scaling.type", f"a second stretching beside '{ROPE_DIVISORS}' is not implemented")
        return _llama3(keys, divisors, width)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn" and original:
        # llama.cpp multiplies its own temperature by this one.
        temperature = None if attention == 1.0 else attention * (0.1 * math.log(factor) + 1.0)
        return RopeScaling(kind="yarn", factor=factor, original_context=original, attention_factor=temperature)
    raise keys.refuse("rope.scaling.type", "known kinds are none, linear and yarn (with its original context length)")


def _llama3(keys: "_Keys", divisors: np.ndarray, width: int) -> RopeScaling:
    """Llama 3.1's bands from the divisors that they led to: the largest is the factor, the rest must follow."""
    factor = float(divisors.max())
    scaling = RopeScaling(kind="llama3", factor=factor, original_context=LLAMA3_ORIGINAL_CONTEXT)
    theta = keys.number("rope.freq_base", 10000.0) ** -(np.arange(0, width, 2) / width)
    rotations = LLAMA3_ORIGINAL_CONTEXT * theta / (2 * math.pi)
    band = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((rotations - scaling.low_freq_factor) / band, 0, 1)
    follow = 1 / ((1 - keep) / factor + keep)
    if divisors.shape != follow.shape or not np.allclose(divisors, follow, rtol=1e-3):
        raise CheckpointError(
            f"{keys.header.path} stretches its rotary frequencies by '{ROPE_DIVISORS}' in another way than Llama 3.1; "
            "use the original checkpoint, whose config.json says how"
        )
    return scaling


class _Keys:
    """The architecture's own keys, each of which must be taken, harmless, or say that a feature is absent."""

    def __init__(self, header: Header, architecture: str):
        self.header, self.prefix = header, f"{architecture}."
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        self._taken.add(name)
        return self.header.values.get(self.prefix + name, default)

    def size(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default)
        if value is None:
            raise CheckpointError(f"{self.header.path} lacks the key '{self.prefix}{name}'; it is incomplete")
        if isinstance(value, bool) or not isinstance(value, int) or (value <= 0 and value != default):
            raise self.refuse(name, "one positive whole number for all layers was expected")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refuse(name, "a number was expected")
        # 1e-5 was stored in 32 bits: take the shortest decimal that they can mean, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if np.float32(value) == value else float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false was expected")
        return value

    def must_be(self, name: str, value: Any, why: str) -> None:
        if self.take(name, value) != value:
            raise self.refuse(name, why)

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def rows(self, tensor: str) -> int:
        if tensor not in self.header.tensors:
            raise CheckpointError(f"{self.header.path} lacks the tensor '{tensor}'; it is incomplete")
        return self.header.tensors[tensor].shape[0]

    def refuse(self, name: str, why: str) -> CheckpointError:
        value = repr(self.header.values.get(self.prefix + name))
        return CheckpointError(f"{self.header.path} sets {self.prefix + name!r} to {value[:60]}: {why}")

    def finish(self) -> None:
        for full, value in self.header.values.items():
            name = full.removeprefix(self.prefix)
            if full == name or name in self._taken or name in HARMLESS or (name in ABSENT and value == ABSENT[name]):
                continue
            raise self.refuse(name, "Colonnade does not know this key; use the original checkpoint of the model")
