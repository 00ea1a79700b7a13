"""Published models with experts by name; :mod:`colonnade.config.presets` lists them among the others."""

from collections.abc import Callable
from typing import Any

from colonnade.config.model import LatentConfig, ModelConfig, RopeScaling
from colonnade.config.moe import MoeConfig, RouterConfig
from colonnade.config.presets_common import gpt2, qwen3

HF_BALANCE: dict[str, Any] = {"balance": "choices", "balance_over": "model"}
"""The balance loss as transformers computes it."""


def _mixtral(layers: int, width: int, heads: int, ffn_width: int, context: int, weight: float) -> ModelConfig:
    return ModelConfig(
        family="mixtral",
        vocab_size=32000,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=8,
        ffn_width=ffn_width,
        context=context,
        rope_theta=1e6,
        moe=MoeConfig(experts=8, active=2, ffn_width=ffn_width, **HF_BALANCE, balance_weight=weight),
    )


def _qwen3(layers: int, width: int, heads: int, ffn_width: int, expert_width: int) -> ModelConfig:
    moe = MoeConfig(experts=128, active=8, ffn_width=expert_width, **HF_BALANCE, balance_weight=0.001)
    return qwen3(layers, width, heads, ffn_width, family="qwen3_moe", kv_heads=4, moe=moe)


def _deepseek_v2(layers: int, width: int, heads: int, q_rank: int, ffn_width: int, moe: MoeConfig) -> ModelConfig:
    return ModelConfig(
        family="deepseek_v2",
        vocab_size=102400,
        layers=layers,
        width=width,
        heads=heads,
        head_width=192,
        latent=LatentConfig(kv_rank=512, q_rank=q_rank, rope_width=64, v_width=128),
        ffn_width=ffn_width,
        context=163840,
        rope_scaling=RopeScaling(kind="yarn", factor=40, original_context=4096, mscale=0.707, mscale_all_dim=0.707),
        norm_eps=1e-6,
        moe=moe,
    )


MOE_PRESETS: dict[str, Callable[[], ModelConfig]] = {
    # GPT-2's smallest, with experts in every other layer, from the second on.
    # One expert a token, at most 1.25 times its share of them, the router's input jittered (arXiv 2101.03961).
    "gpt2-switch-8": lambda: gpt2(
        12, 768, 12,
        moe=MoeConfig(
            experts=8, active=1, ffn_width=3072, first=1, every=2, capacity=1.25,
            router=RouterConfig(kind="switch", jitter=0.01),
        ),
    ),
    # Two experts a token, at most twice their share, the loss by first choices (arXiv 2006.16668).
    "gpt2-gshard-8": lambda: gpt2(
        12, 768, 12,
        moe=MoeConfig(
            experts=8, active=2, ffn_width=3072, first=1, every=2, capacity=1.0, balance="gshard",
            router=RouterConfig(kind="gshard"),
        ),
    ),
    # mistralai/Mixtral-8x7B-v0.1, -8x22B-v0.1
    "mixtral-8x7b": lambda: _mixtral(32, 4096, 32, 14336, 32768, 0.02),
    "mixtral-8x22b": lambda: _mixtral(56, 6144, 48, 16384, 65536, 0.001),
    # Qwen/Qwen1.5-MoE-A2.7B
    "qwen1.5-moe-a2.7b": lambda: ModelConfig(
        family="qwen2_moe",
        vocab_size=151936,
        layers=24,
        width=2048,
        heads=16,
        ffn_width=5632,
        context=8192,
        rope_theta=1e6,
        norm_eps=1e-6,
        qkv_bias=True,
        moe=MoeConfig(
            experts=60, active=4, ffn_width=1408, shared_width=5632, shared_gate=True,
            router=RouterConfig(normalise=False), **HF_BALANCE, balance_weight=0.001,
        ),
    ),
    # Qwen/Qwen3-30B-A3B, -235B-A22B
    "qwen3-30b-a3b": lambda: _qwen3(48, 2048, 32, 6144, 768),
    "qwen3-235b-a22b": lambda: _qwen3(94, 4096, 64, 12288, 1536),
    # allenai/OLMoE-1B-7B-0924
    "olmoe-1b-7b": lambda: ModelConfig(
        family="olmoe",
        vocab_size=50304,
        layers=16,
        width=2048,
        heads=16,
        ffn_width=1024,
        context=4096,
        qk_norm=True,
        qk_norm_over="all",
        moe=MoeConfig(
            experts=64, active=8, ffn_width=1024, **HF_BALANCE, balance_weight=0.01, z_weight=0.001,
            router=RouterConfig(normalise=False),
        ),
    ),
    # deepseek-ai/DeepSeek-V2-Lite, DeepSeek-V2, DeepSeek-V3
    "deepseek-v2-lite": lambda: _deepseek_v2(
        27, 2048, 16, 0, 10944,
        MoeConfig(
            experts=64, active=6, ffn_width=1408, shared_width=2816, first=1, balance_weight=0.001,
            router=RouterConfig(normalise=False),
        ),
    ),
    "deepseek-v2": lambda: _deepseek_v2(
        60, 5120, 128, 1536, 12288,
        MoeConfig(
            experts=160, active=6, ffn_width=1536, shared_width=3072, first=1, balance_weight=0.001,
            router=RouterConfig(normalise=False, scale=16.0, groups=8, groups_kept=3, group_score="max"),
        ),
    ),
    "deepseek-v3": lambda: ModelConfig(
        family="deepseek_v3",
        vocab_size=129280,
        layers=61,
        width=7168,
        heads=128,
        head_width=192,
        latent=LatentConfig(kv_rank=512, q_rank=1536, rope_width=64, v_width=128),
        ffn_width=18432,
        context=163840,
        rope_scaling=RopeScaling(kind="yarn", factor=40, original_context=4096, mscale=1.0, mscale_all_dim=1.0),
        norm_eps=1e-6,
        moe=MoeConfig(
            experts=256, active=8, ffn_width=2048, shared_width=2048, first=3, balance="none", balance_weight=0.001,
            bias_rate=0.001,
            router=RouterConfig(kind="sigmoid", scale=2.5, groups=8, groups_kept=4),
        ),
    ),
}  # fmt: skip
"""Name to a function that makes the config, so that importing this file makes none."""
