"""Tiny models with odd sizes and ragged data, for parity tests."""

from collections.abc import Iterable

import torch

from colonnade.config import LatentConfig, ModelConfig, MoeConfig, RopeScaling
from colonnade.model import IGNORE, Packed, Stream, Transformer, initialise
from colonnade.parallel.axis import SOLO_AXES, Axes
from colonnade.parallel.layout import layout_of, local_part

_TINY = {"layers": 2, "width": 24, "ffn_width": 26, "context": 64}
_GPT2 = {
    "family": "gpt2",
    "positions": "learned",
    "norm": "layernorm",
    "gated": False,
    "activation": "gelu_tanh",
    "qkv_bias": True,
    "out_bias": True,
    "ffn_bias": True,
    "tied": True,
}

CONFIGS: dict[str, ModelConfig] = {
    "gpt2": ModelConfig(vocab_size=101, heads=12, head_width=2, **_TINY, **_GPT2),
    "llama": ModelConfig(vocab_size=101, heads=12, kv_heads=12, head_width=4, **_TINY),
    "llama_grouped_biased": ModelConfig(
        vocab_size=67, heads=24, kv_heads=12, head_width=2, qkv_bias=True, ffn_bias=True, out_bias=True, **_TINY
    ),
    "qwen3_window_tied": ModelConfig(
        family="qwen3", vocab_size=67, heads=12, head_width=4, qk_norm=True, tied=True, window=5, window_from_layer=1,
        **_TINY,
    ),
    "llama3_rope": ModelConfig(
        vocab_size=50257, heads=12, head_width=4,
        rope_scaling=RopeScaling(kind="llama3", factor=8, original_context=16),
        **(_TINY | {"layers": 1}),
    ),
    "olmoe_clipped": ModelConfig(
        family="olmoe", vocab_size=67, heads=24, kv_heads=12, head_width=2, qk_norm=True, qk_norm_over="all",
        qkv_clip=0.7, **_TINY,
    ),
    "latent": ModelConfig(
        family="deepseek_v3", vocab_size=101, heads=12, head_width=6,
        latent=LatentConfig(kv_rank=7, q_rank=9, rope_width=4, v_width=3), **_TINY,
    ),
    "latent_yarn_biased": ModelConfig(
        family="deepseek_v2", vocab_size=67, heads=12, head_width=5, qkv_bias=True, out_bias=True,
        latent=LatentConfig(kv_rank=5, rope_width=2, v_width=5),
        rope_scaling=RopeScaling(kind="yarn", factor=8, original_context=8, mscale=0.7, mscale_all_dim=0.9), **_TINY,
    ),
}  # fmt: skip
"""12 key/value heads divide by tp 1, 2, 3 and 4; 26 hidden units and the vocabularies do not."""

_BERT = _GPT2 | {"family": "bert", "activation": "gelu", "norm_eps": 1e-12, "causal": False, "segments": 2}
_POST = {"norm_order": "post", "embed_norm": True}
BERTS: dict[str, ModelConfig] = {
    "post_pretraining": ModelConfig(
        vocab_size=101, heads=12, head_width=2, task_head="pretraining", **_TINY, **(_BERT | _POST)
    ),
    "pre_pretraining": ModelConfig(
        vocab_size=101, heads=12, head_width=2, task_head="pretraining",
        **_TINY, **(_BERT | {"family": "megatron-bert"}),
    ),
    "post_masked": ModelConfig(vocab_size=67, heads=12, head_width=2, task_head="masked", **_TINY, **(_BERT | _POST)),
    "pre_classes": ModelConfig(
        vocab_size=67, heads=12, head_width=2, task_head="classes", classes=5, **_TINY,
        **(_BERT | {"family": "megatron-bert", "activation": "gelu_tanh"}),
    ),
    "post_spans": ModelConfig(vocab_size=67, heads=12, head_width=2, task_head="spans", **_TINY, **(_BERT | _POST)),
    "post_encoder": ModelConfig(vocab_size=67, heads=12, head_width=2, task_head="encoder", **_TINY, **(_BERT | _POST)),
}  # fmt: skip
"""Pre- and post-norm encoders with each output head."""

THREE_KV_HEADS = ModelConfig(vocab_size=101, heads=6, kv_heads=3, head_width=4, **_TINY)
"""A model for tp=3."""

LENGTHS = [7, 1, 13, 4]
"""Ragged documents."""


def build(config: ModelConfig, axes: Axes = SOLO_AXES, *, seed: int = 0, dtype: torch.dtype = torch.float64):
    """An initialised model; norms and biases differ from 1 and 0, where wrong gradients could hide."""
    model = initialise(Transformer(config, axes, dtype=dtype), seed)
    shapes, layout = model.global_shapes(), layout_of(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")):
                p.add_(local_part(torch.linspace(-0.5, 0.5, shapes[name][0], dtype=dtype), layout[name], axes))
            elif name.endswith(("down.bias", "out.bias")):
                p.add_(torch.linspace(-0.1, 0.1, len(p), dtype=dtype))
            elif name.endswith(("up_bias", "gate_bias", "down_bias")):
                far = torch.linspace(-0.1, 0.1, shapes[name].numel(), dtype=dtype).view(shapes[name])
                p.add_(local_part(far, layout[name], axes))
    return model


def ragged(config: ModelConfig, lengths: list[int] = LENGTHS, seed: int = 0) -> tuple[Stream, Packed, torch.Tensor]:
    """A stream of documents, its attend, and targets, some ignored."""
    generator = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    tokens = torch.randint(config.vocab_size, (T,), generator=generator)
    targets = torch.randint(config.vocab_size, (T,), generator=generator)
    targets[torch.rand(T, generator=generator) < 0.2] = IGNORE
    positions = torch.cat([torch.arange(n) for n in lengths])
    return Stream(tokens, positions), Packed.of(lengths), targets


def pairs(config: ModelConfig, lengths: list[int] = LENGTHS, seed: int = 0) -> tuple[Stream, Packed, torch.Tensor]:
    """A stream of documents with two segments, bidirectional attend, and targets, most ignored."""
    stream, _, targets = ragged(config, lengths, seed)
    segments = torch.cat([(torch.arange(n) >= n // 2).long() for n in lengths])
    targets[torch.rand(len(targets), generator=torch.Generator().manual_seed(seed)) < 0.6] = IGNORE
    return stream._replace(segments_T=segments), Packed.of(lengths, causal=False), targets


def pairwise(names: Iterable[str]) -> list[tuple[str, int, bool]]:
    """(name, tp, sequence_parallel): each name with each value, and all pairs of values over several names."""
    found = []
    for i, name in enumerate(names):
        sequence = (i % 2 == 1, i % 2 == 0, i // 2 % 2 == 1)
        found += [(name, 1, False)] + [(name, tp, sp) for tp, sp in zip((2, 3, 4), sequence, strict=True)]
    return found


_EXPERTS = {"experts": 6, "ffn_width": 12, "balance_weight": 0.3, "z_weight": 0.2}
MOES: dict[str, ModelConfig] = {
    "gated": ModelConfig(vocab_size=101, heads=12, head_width=2, **_TINY, moe=MoeConfig(active=2, **_EXPERTS)),
    "biased_shared": ModelConfig(
        vocab_size=67, heads=12, head_width=2, **_TINY, **_GPT2,
        moe=MoeConfig(active=3, first_k_dense_replace=1, shared_width=7, shared_gate=True, balance="gshard",
        **_EXPERTS),
    ),
    "capacity": ModelConfig(
        vocab_size=67, heads=12, head_width=2, **_TINY,
        moe=MoeConfig(active=2, capacity=0.75, priority=True, balance="importance", **_EXPERTS),
    ),
}  # fmt: skip
"""Six experts of twelve hidden units, which can be divided over 2, 3 and 4 (etp) ranks."""
