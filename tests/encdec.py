"""Helpers for tests of encoder–decoder models; does not import transformers, because workers import this."""

import torch
from torch import Tensor

from colonnade.config import EncoderConfig, ModelConfig, MoeConfig, RelativePositions, RouterConfig
from colonnade.model import EncoderDecoderAttend, Packed, PackedMemory, Source, Stream, Transformer, initialise
from colonnade.parallel.axis import SOLO_AXES, Axes
from colonnade.parallel.layout import WHOLE, layout_of, local_part

SOURCES, TARGETS = [9, 1, 31], [5, 12, 2]


def t5(version: str = "1.0", **changes: object) -> ModelConfig:
    """A small T5."""
    old = version == "1.0"
    config = ModelConfig(
        family="t5", vocab_size=53, layers=2, width=24, heads=4, head_width=5, ffn_width=31, context=512,
        positions="none", relative_positions=RelativePositions(buckets=8, distance=12), score_scale=1.0,
        norm_eps=1e-6, encoder=EncoderConfig(layers=3), gated=not old, activation="relu" if old else "gelu_tanh",
        tied=old, scale_decoder_outputs=old,
    )  # fmt: skip
    return config.replace(**changes)


def switch(**changes: object) -> ModelConfig:
    """A small Switch Transformer whose capacity binds, with experts in block 1 of the decoder, 1 of the encoder."""
    moe = MoeConfig(
        experts=4, active=1, ffn_width=24, first_k_dense_replace=1, layer_freq=2, capacity_tokens=2,
        capacity_over="sequence", router=RouterConfig(kind="switch", jitter=0.1), balance_weight=0.1, z_weight=0.1,
    )  # fmt: skip
    encoder = EncoderConfig(layers=3, first_k_dense_replace=1, layer_freq=2)
    return t5("1.0", family="switch_transformers", moe=moe, encoder=encoder, **changes)


def nllb(**changes: object) -> ModelConfig:
    """A small NLLB-MoE with experts in block 1 of each stack."""
    config = ModelConfig(
        family="nllb-moe", vocab_size=53, layers=2, width=24, heads=4, ffn_width=31, context=64,
        positions="sinusoidal", scale_embedding=True, norm="layernorm", activation="relu", gated=False, qkv_bias=True,
        out_bias=True, ffn_bias=True, tied=True,
        moe=MoeConfig(
            experts=4, active=2, ffn_width=24, first_k_dense_replace=1, layer_freq=2, output_mask=0.2,
            balance="gshard",
        ),
        encoder=EncoderConfig(
            layers=2, context=64, start_token=2, languages=True, first_k_dense_replace=1, layer_freq=2
        ),
    )  # fmt: skip
    return config.replace(**changes)


def random_model(config: ModelConfig, axes: Axes = SOLO_AXES) -> Transformer:
    """This rank's share of a model whose parts all matter."""
    model = initialise(Transformer(config, axes, dtype=torch.float64), 0)
    layout, shapes = layout_of(model), model.global_shapes()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(shapes[name], generator=generator, dtype=torch.float64)
            p.copy_(local_part(noise * 0.3 + (1.0 if p.dim() == 1 else 0.0), layout.get(name, WHOLE), axes))
    return model.eval().requires_grad_(False)


def texts(lengths: list[int], vocab_size: int, seed: int = 1) -> list[Tensor]:
    """Random sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab_size, (n,), generator=generator) for n in lengths]


def inputs(sources: list[Tensor], targets: list[Tensor], kernels: str = "auto") -> tuple[Stream, EncoderDecoderAttend]:
    """(stream, attend) of pairs in one pass."""
    positions_T, positions_S = (torch.cat([torch.arange(len(x)) for x in part]) for part in (targets, sources))
    own = Packed.of([len(x) for x in targets], kernels=kernels)
    source = Packed.of([len(x) for x in sources], causal=False, kernels=kernels)
    stream = Stream(torch.cat(targets), positions_T, source=Source(torch.cat(sources), positions_S))
    lengths = {"longest": (own.longest, source.longest), "equal": own.equal and source.equal}
    return stream, EncoderDecoderAttend(
        own, source, PackedMemory(source.cu_seqlens, own.cu_seqlens, kernels=kernels, **lengths)
    )
