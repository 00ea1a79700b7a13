"""Quantises a loaded model, block after block, each calibrated on the outputs of the quantised ones before it.

    model = colonnade.load("smollm2")
    compress(model.transformer, Compression(weights="int4"), texts)
    colonnade.save(model, "folder")

The calibration texts must come from what a model may be trained on, never from what it is measured on.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from colonnade.compress.calibrate import BlockRunner, InputStatistics
from colonnade.compress.fold import fold
from colonnade.compress.gptq import gptq, nearest
from colonnade.compress.grids import GridKind
from colonnade.config import Config, WeightGroup
from colonnade.config.feature_checks import check_quantised
from colonnade.errors import CheckpointError, ConfigError, DataError, PlanError
from colonnade.kernels.linear.quantise import Kind, Quantised
from colonnade.model import Transformer
from colonnade.model.moe.experts import Experts
from colonnade.model.tensor_parallel_linear import QuantisableMatrix
from colonnade.model.transformer import Block
from colonnade.model.weight_only_quant import (
    assign_quantised,
    kind_of,
    quantisable_modules,
    quantised_kind,
)


class Compression(Config):
    """How weights are quantised."""

    weights: Kind = "int4"
    """int8 and float8 with one scale per row, int4 with one per group of inputs; int8_dynamic also rounds inputs."""
    by: Literal["gptq", "nearest"] = "gptq"
    """gptq corrects each weight's rounding in those not rounded yet and needs texts; nearest rounds each by itself."""
    weight_group: WeightGroup = 64
    """int4: consecutive inputs that share a scale."""
    grid: GridKind = "affine"
    """int4: a low value per group (affine), an integer zero point per group (zero), or the zero point 8 (symmetric)."""
    fold: bool = True
    """gptq: scale inputs first, for int4 by AWQ's rule, for int8_dynamic by SmoothQuant's."""
    min_tokens: int | None = Field(default=None, gt=0)
    """Tokens that a calibration needs; None: as many as the widest matrix has inputs."""


@torch.no_grad()
def compress(
    model: Transformer,
    compression: Compression,
    texts: Sequence[Tensor] = (),
    progress: Callable[[int, int], object] = lambda _done, _of: None,
) -> None:
    """Quantise ``model``, whole and in float32, in place; ``texts`` are int64 token ids (T,).

    ``progress(done, of)`` is called after each block. Raises :class:`ConfigError` for a model that is quantised
    already or that cannot be, :class:`PlanError` for a sharded one, and :class:`DataError` for too few or unusable
    texts.
    """
    _check(model, compression)
    kind, group, grid = compression.weights, compression.weight_group, compression.grid
    modules = quantisable_modules(model)
    if compression.by == "nearest":
        for name in modules:
            _assign(model, name, lambda w, k, _: nearest(w, k, group, grid), kind)
        return
    _check_texts(modules_inputs(model), compression, texts)
    runner = BlockRunner(model, texts)
    for layer in range(model.config.layers):
        block = model.blocks.get_submodule(str(layer))
        assert isinstance(block, Block)
        statistics = InputStatistics(block)
        with statistics.gather():
            runner.run(layer)
        if compression.fold and kind in ("int4", "int8_dynamic"):
            fold(block, statistics, kind, group, grid)
        prefix = f"blocks.{layer}."
        for name in (name for name in modules if name.startswith(prefix)):
            _gptq_parameter(model, name, statistics, compression)
        runner.hidden = runner.run(layer)
        progress(layer + 1, model.config.layers)
    for name in (name for name in modules if not name.startswith("blocks.")):  # the output projection
        hidden_TD = torch.cat(runner.hidden).double()
        hessian = hidden_TD.T @ hidden_TD * (2 / len(hidden_TD))
        _assign(model, name, lambda w, k, _, h=hessian: gptq(w, h, k, group, grid), kind)


def modules_inputs(model: Transformer) -> int:
    """The largest number of inputs of a dense matrix of ``model``'s blocks."""
    return max(
        module.get_parameter("weight").shape[1]
        for name, module in quantisable_modules(model).items()
        if not isinstance(module, Experts) and name.startswith("blocks.")
    )


def _gptq_parameter(model: Transformer, name: str, statistics: InputStatistics, compression: Compression) -> None:
    module_name, _, part = name.rpartition(".")
    local = module_name.split(".", 2)[2]  # the name within the block
    group, grid = compression.weight_group, compression.grid
    if local in statistics.experts:
        hessians = statistics.expert_hessians(local, "down" if part == "down" else "up")
        _assign(model, name, lambda w, k, e: gptq(w, hessians[e], k, group, grid), compression.weights)
    else:
        hessian = statistics.linears[local].hessian
        _assign(model, name, lambda w, k, _: gptq(w, hessian, k, group, grid), compression.weights)


def _assign(model: Transformer, name: str, quantise: Callable[[Tensor, Kind, int], Quantised], kind: Kind) -> None:
    """Replace a matrix, or each of a stack, by ``quantise(matrix, kind, its number)``."""
    module_name, _, part = name.rpartition(".")
    module, kind = model.get_submodule(module_name), kind_of(name, kind)
    value = module.get_parameter(part).detach()
    if not value.isfinite().all():
        raise CheckpointError(
            f"the weight '{name}' is not finite and cannot be put into {kind}; use another checkpoint"
        )
    if isinstance(module, Experts):
        matrices = [quantise((w.T if part == "down" else w).float(), kind, e) for e, w in enumerate(value)]
        wide = any(matrix.has_wide_scales for matrix in matrices)
        scales = [matrix.scales.float() if wide else matrix.scales for matrix in matrices]
        stack = torch.stack([matrix.values.view(torch.int8) for matrix in matrices]).view(matrices[0].values.dtype)
        assign_quantised(module, name, matrices[0]._replace(values=stack, scales=torch.stack(scales)))
    else:
        assert isinstance(module, QuantisableMatrix)
        assign_quantised(module, name, quantise(value.float(), kind, 0))


def _check(model: Transformer, compression: Compression) -> None:
    if (already := quantised_kind(model)) is not None:
        raise ConfigError(f"this model's weights are in {already} already; load it with weights='dense'")
    if (ranks := model.axes.tp.size * model.axes.experts.tokens.size) > 1:
        raise PlanError(
            f"compression takes a whole model on one process, and this is spread over {ranks}; load it alone"
        )
    check_quantised(model.config, compression.weights, compression.weight_group, tp=1)


def _check_texts(inputs: int, compression: Compression, texts: Sequence[Tensor]) -> None:
    tokens, needed = sum(len(text) for text in texts), compression.min_tokens or inputs
    if tokens < needed:
        raise DataError(
            f"the calibration texts have {tokens:,} tokens, and a matrix of {inputs:,} inputs needs at least "
            f"{needed:,}; give more text, or --by nearest, which needs none"
        )
