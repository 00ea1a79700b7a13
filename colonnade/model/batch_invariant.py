"""Batch-invariant kernels of a model: a row's bits do not depend on the other rows.

Libraries choose the order of a sum by the number of rows, so the last bits of a logit depend on the batch. Here

    CPU    a whole pass in C++ (:mod:`~colonnade.kernels.cpu`), whose sums have an order that depends on one row only
    GPU    products, norms and attention with tiles that do not depend on the number of rows
           (:mod:`~colonnade.kernels.triton_batch_invariant`); everything else works element by element

Models that the C++ kernels do not cover (experts, latent attention, float64, quantised weights) have none on a CPU:
they are invariant only if each token is a pass of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from colonnade.errors import ConfigError
from colonnade.kernels.cpu import kernels as cpu_kernels
from colonnade.kernels.registry import TRITON
from colonnade.model.fused_block import fuses_dense_steps
from colonnade.model.norm import HeadsNorm, Norm
from colonnade.model.tensor_parallel_linear import Linear
from colonnade.model.transformer import Transformer
from colonnade.model.weight_only_quant import quantised_kind

NAME = "batch_invariant"
"""Of the kernels (:mod:`~colonnade.kernels.registry`)."""
MAX_HEAD_WIDTH = 256
"""Widest heads of the attention kernel on a GPU."""


def has_kernels(model: Transformer) -> bool:
    """Whether ``model``, on one rank, has such kernels; raises :class:`ConfigError` for one without on a GPU."""
    config, weight = model.config, next(model.parameters())
    kind = quantised_kind(model)
    if weight.device.type == "cpu":
        plain = config.moe is None and config.latent is None and kind is None and fuses_dense_steps(config)
        return plain and cpu_kernels.available(weight.dtype)
    unsupported = {
        "experts": config.moe is not None,
        "latent attention": config.latent is not None,
        f"heads wider than {MAX_HEAD_WIDTH}": config.head_width > MAX_HEAD_WIDTH,
        f"weights in {kind}": kind is not None,
        "float64": weight.dtype == torch.float64,
        "torch without Triton": not TRITON,
    }
    if found := [what for what, present in unsupported.items() if present]:
        raise ConfigError(
            f"there are no batch-invariant kernels for {' and '.join(found)} on a GPU; use --device cpu, or remove "
            "serve.batch_invariant or tune.exact"
        )
    return True


def select_kernels(model: Transformer) -> None:
    """Switch ``model`` to its batch-invariant kernels permanently."""
    for module, name, value in _settings(model):
        setattr(module, name, value)


@contextmanager
def selected_kernels(model: Transformer) -> Iterator[None]:
    """Switch ``model`` to its batch-invariant kernels temporarily."""
    settings = _settings(model)
    before = [(module, name, getattr(module, name)) for module, name, _ in settings]
    select_kernels(model)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _settings(model: Transformer) -> list[tuple[nn.Module, str, Any]]:
    """(module, attribute, value) of the batch-invariant kernels."""
    settings: list[tuple[nn.Module, str, Any]] = [(model, "kernels", NAME)]
    fused = next(model.parameters()).device.type == "cpu"
    if fused:  # the norms within blocks are part of the products
        settings += [(block, name, value) for block in model.blocks for name, value in
                     (("fused", True), ("kernels", NAME))]  # fmt: skip
        settings += [(model.norm, "kernels", NAME)] if isinstance(model.norm, Norm) else []
    kinds = Linear if fused else (Linear, Norm, HeadsNorm)
    return settings + [(module, "kernels", NAME) for module in model.modules() if isinstance(module, kinds)]
