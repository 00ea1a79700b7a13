"""Published models by name, as the :class:`ModelConfig` that their authors' config.json describes.

    preset("smollm2-135m")

Sizes are facts of the checkpoints on the Hugging Face Hub, named beside each group; the number of parameters that they
lead to is compared with the published one in ``tests/unit/test_config_presets.py``. ``tour`` and the Megatron shapes
have no weights to load: they are for training.
"""

from collections.abc import Callable
from typing import Any

from colonnade.config.base import nearest
from colonnade.config.model import ModelConfig, RopeScaling
from colonnade.config.moe import MoeConfig
from colonnade.config.presets_common import gpt2, qwen3
from colonnade.config.presets_moe import MOE_PRESETS
from colonnade.errors import ConfigError


def _bert(layers: int, width: int, heads: int, *, original: bool = False, **fields: Any) -> ModelConfig:
    """An encoder of F = 4 D, norms before each part (Megatron-LM, figure 7b) or after it (``original``, figure 7a)."""
    common: dict[str, Any] = {
        "family": "bert" if original else "megatron-bert",
        "vocab_size": 30522,
        "context": 512,
        "positions": "learned",
        "segments": 2,
        "norm": "layernorm",
        "norm_eps": 1e-12,
        "norm_order": "post" if original else "pre",
        "embed_norm": original,
        "activation": "gelu",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "tied": True,
        "causal": False,
        "top": "pretraining",
    }
    return ModelConfig(layers=layers, width=width, heads=heads, ffn_width=4 * width, **(common | fields))


def _llama2(layers: int, width: int, heads: int, kv_heads: int, ffn_width: int, **fields: Any) -> ModelConfig:
    common: dict[str, Any] = {"vocab_size": 32000, "context": 4096}
    return ModelConfig(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn_width=ffn_width,
        **(common | fields),
    )


def _code_llama(
    layers: int, width: int, heads: int, kv_heads: int, ffn_width: int, vocab_size: int = 32016
) -> ModelConfig:
    """Llama 2's shape, a longer context and a longer rotary base (Roziere 2023, arXiv 2308.12950)."""
    return _llama2(layers, width, heads, kv_heads, ffn_width, vocab_size=vocab_size, context=16384, rope_theta=1e6)


def _llama3(layers: int, width: int, heads: int, ffn_width: int, factor: float = 1.0, **fields: Any) -> ModelConfig:
    """``factor`` > 1 is Llama 3.1's stretch of the original 8,192 tokens, to 131,072."""
    return ModelConfig(
        vocab_size=128256,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=8,
        ffn_width=ffn_width,
        context=131072 if factor > 1 else 8192,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(kind="llama3", factor=factor) if factor > 1 else None,
        **fields,
    )


def _smollm2(layers: int, width: int, heads: int, kv_heads: int, ffn_width: int, theta: float) -> ModelConfig:
    return ModelConfig(
        vocab_size=49152,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn_width=ffn_width,
        context=8192,
        rope_theta=theta,
        tied=True,
    )


def _qwen2(layers: int, width: int, heads: int, kv_heads: int, ffn_width: int, **fields: Any) -> ModelConfig:
    common: dict[str, Any] = {"family": "qwen2", "vocab_size": 151936, "context": 131072, "tied": True}
    return ModelConfig(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn_width=ffn_width,
        rope_theta=1e6,
        norm_eps=1e-6,
        qkv_bias=True,
        **(common | fields),
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    # The demo's: four million parameters, a laptop's minute and a half; 4 key/value heads lie on 1, 2 or 4 ranks.
    "tour": lambda: ModelConfig(
        vocab_size=4096, layers=4, width=256, heads=8, kv_heads=4, ffn_width=704, context=512, tied=True
    ),
    # As much arithmetic for a token, and four times the hidden units.
    "tour-moe": lambda: ModelConfig(
        family="mixtral",
        vocab_size=4096,
        layers=4,
        width=256,
        heads=8,
        kv_heads=4,
        ffn_width=704,
        context=512,
        tied=True,
        moe=MoeConfig(experts=8, active=2, ffn_width=352),
    ),
    # openai-community/gpt2, -medium, -large, -xl
    "gpt2": lambda: gpt2(12, 768, 12),
    "gpt2-medium": lambda: gpt2(24, 1024, 16),
    "gpt2-large": lambda: gpt2(36, 1280, 20),
    "gpt2-xl": lambda: gpt2(48, 1600, 25),
    # Megatron-LM's scaling study (arXiv 1909.08053, table 1): heads 96 wide, vocabulary padded to 51,200.
    "gpt2-1.2b": lambda: gpt2(40, 1536, 16, vocab_size=51200),
    "gpt2-2.5b": lambda: gpt2(54, 1920, 20, vocab_size=51200),
    "gpt2-4.2b": lambda: gpt2(64, 2304, 24, vocab_size=51200),
    "gpt2-8.3b": lambda: gpt2(72, 3072, 32, vocab_size=51200),
    # The models that it trains to the end (table 2); its 2.5B is the one above.
    "gpt2-355m": lambda: gpt2(24, 1024, 16, vocab_size=51200),
    "gpt2-8.3b-24-heads": lambda: gpt2(72, 3072, 24, vocab_size=51200),
    # Its BERTs (table 4): heads 64 wide, norms rearranged (figure 7b).
    "bert-336m": lambda: _bert(24, 1024, 16),
    "bert-1.3b": lambda: _bert(24, 2048, 32),
    "bert-3.9b": lambda: _bert(48, 2560, 40),
    # google-bert/bert-base-uncased, bert-large-uncased; sentence-transformers/all-MiniLM-L6-v2
    "bert-base": lambda: _bert(12, 768, 12, original=True),
    "bert-large": lambda: _bert(24, 1024, 16, original=True),
    "minilm-l6": lambda: _bert(6, 384, 12, original=True, top="encoder"),
    # The smallest that learns something of the sample speeches in minutes.
    "bert-tour": lambda: _bert(4, 256, 4, vocab_size=4096),
    # HuggingFaceTB/SmolLM2-135M, -360M, -1.7B
    "smollm2-135m": lambda: _smollm2(30, 576, 9, 3, 1536, 1e5),
    "smollm2-360m": lambda: _smollm2(32, 960, 15, 5, 2560, 1e5),
    "smollm2-1.7b": lambda: _smollm2(24, 2048, 32, 32, 8192, 1.3e5),
    # meta-llama/Llama-2-7b-hf, -13b-hf, -70b-hf
    "llama-2-7b": lambda: _llama2(32, 4096, 32, 32, 11008),
    "llama-2-13b": lambda: _llama2(40, 5120, 40, 40, 13824),
    "llama-2-70b": lambda: _llama2(80, 8192, 64, 8, 28672),
    # codellama/CodeLlama-7b-hf, -13b-hf, -34b-hf
    "code-llama-7b": lambda: _code_llama(32, 4096, 32, 32, 11008),
    "code-llama-13b": lambda: _code_llama(40, 5120, 40, 40, 13824),
    "code-llama-34b": lambda: _code_llama(48, 8192, 64, 8, 22016, vocab_size=32000),
    # meta-llama/Meta-Llama-3-8B, -70B; Llama-3.1-8B, -70B; Llama-3.2-1B, -3B
    "llama-3-8b": lambda: _llama3(32, 4096, 32, 14336),
    "llama-3-70b": lambda: _llama3(80, 8192, 64, 28672),
    "llama-3.1-8b": lambda: _llama3(32, 4096, 32, 14336, factor=8.0),
    "llama-3.1-70b": lambda: _llama3(80, 8192, 64, 28672, factor=8.0),
    "llama-3.2-1b": lambda: _llama3(16, 2048, 32, 8192, factor=32.0, tied=True),
    "llama-3.2-3b": lambda: _llama3(28, 3072, 24, 8192, factor=32.0, tied=True),
    # mistralai/Mistral-7B-v0.1
    "mistral-7b": lambda: ModelConfig(
        family="mistral",
        vocab_size=32000,
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        ffn_width=14336,
        context=32768,
        window=4096,
    ),
    # Qwen/Qwen2-0.5B, -1.5B, -7B
    "qwen2-0.5b": lambda: _qwen2(24, 896, 14, 2, 4864),
    "qwen2-1.5b": lambda: _qwen2(28, 1536, 12, 2, 8960),
    "qwen2-7b": lambda: _qwen2(28, 3584, 28, 4, 18944, vocab_size=152064, tied=False),
    # Qwen/Qwen3-0.6B, -1.7B, -4B, -8B, -14B, -32B
    "qwen3-0.6b": lambda: qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": lambda: qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": lambda: qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": lambda: qwen3(36, 4096, 32, 12288, tied=False),
    "qwen3-14b": lambda: qwen3(40, 5120, 40, 17408, tied=False),
    "qwen3-32b": lambda: qwen3(64, 5120, 64, 25600, tied=False),
    **MOE_PRESETS,
}
"""Name to a function that makes the config, so that importing this file makes none."""


def preset(name: str) -> ModelConfig:
    """The config of a published model; raises :class:`ConfigError` with the nearest name for one that is not known."""
    if name not in PRESETS:
        raise ConfigError(f"there is no preset '{name}'" + nearest(name, list(PRESETS)))
    return PRESETS[name]()
