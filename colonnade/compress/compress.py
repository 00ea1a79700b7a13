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
from colonnade.compress.ranks import WholeBlock, check_ranks
from colonnade.config import Config, WeightGroup
from colonnade.config.feature_checks import check_quantised
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.kernels.linear.quantise import Kind, Quantised
from colonnade.model import Transformer
from colonnade.model.moe.experts import Experts
from colonnade.model.tensor_parallel_linear import QuantisableMatrix
from colonnade.model.weight_only_quant import (
    assign_quantised,
    kind_of,
    quantisable_modules,
    quantised_kind,
)

FOLDED: tuple[Kind, ...] = ("int4", "int8_dynamic")
"""Formats for which folding has a rule."""


class Compression(Config):
    """How weights are quantised."""

    weights: Kind = "int4"
    """int8 and float8 with one scale per row, int4 with one per group of inputs; int8_dynamic also rounds inputs."""
    by: Literal["gptq", "fold", "nearest"] = "gptq"
    """gptq corrects each weight's rounding in those not rounded yet; fold only scales inputs first (AWQ for int4,
    SmoothQuant for int8_dynamic); both need texts. nearest rounds each weight by itself."""
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
    """Quantise ``model``, in float32, in place; ``texts`` are int64 token ids (T,).

    Several ranks, sharing texts over dp and experts over ep, all give all ``texts`` and get the bits of one process.
    ``progress(done, of)`` is called after each block. Raises :class:`ConfigError` for a model that is quantised
    already or that cannot be, :class:`PlanError` for another layout, and :class:`DataError` for too few or unusable
    texts.
    """
    _check(model, compression)
    if compression.by == "fold" and compression.weights not in FOLDED:
        raise ConfigError(
            f"there is no rule to fold scales for {compression.weights}, only for {' and '.join(FOLDED)}; use "
            "--by gptq or nearest"
        )
    kind, group, grid = compression.weights, compression.weight_group, compression.grid
    modules = quantisable_modules(model)
    if compression.by == "nearest":
        for name in modules:
            _assign(model, name, lambda w, k, _: nearest(w, k, group, grid), kind)
        return
    folds = kind in FOLDED and (compression.fold or compression.by == "fold")
    _check_texts(modules_inputs(model), compression, texts)
    runner = BlockRunner(model, texts)
    for layer in range(model.config.layers):
        with WholeBlock(model, layer).restored() as whole:
            statistics = runner.gather(layer)
            if folds:
                fold(whole.block, statistics, kind, group, grid)
            prefix = f"blocks.{layer}."
            for name in (name for name in modules if name.startswith(prefix)):
                _assign(model, name, _quantiser(name, statistics, compression), kind, whole)
            runner.advance(layer)
        progress(layer + 1, model.config.layers)
    for name in (name for name in modules if not name.startswith("blocks.")):  # the output projection
        hessian = None if compression.by == "fold" else runner.hidden_moments().hessian
        _assign(model, name, _rounding(hessian, compression), kind)


def modules_inputs(model: Transformer) -> int:
    """The largest number of inputs of a dense matrix of ``model``'s blocks."""
    return max(
        module.get_parameter("weight").shape[1]
        for name, module in quantisable_modules(model).items()
        if not isinstance(module, Experts) and name.startswith("blocks.")
    )


Quantiser = Callable[[Tensor, Kind, int], Quantised]
"""Called with a matrix, its format, and its number in a stack."""


def _rounding(hessian: Tensor | None, compression: Compression) -> Quantiser:
    """GPTQ with ``hessian``; without one, rounding to nearest."""
    group, grid = compression.weight_group, compression.grid
    if hessian is None:
        return lambda w, k, _: nearest(w, k, group, grid)
    return lambda w, k, _: gptq(w, hessian, k, group, grid)


def _quantiser(name: str, statistics: InputStatistics, compression: Compression) -> Quantiser:
    module, _, part = name.rpartition(".")
    local = module.split(".", 2)[2]  # the name within the block
    if compression.by == "fold":
        return _rounding(None, compression)
    if local not in statistics.experts:
        return _rounding(statistics.linears[local].hessian, compression)
    hessians = statistics.expert_hessians(local, "down" if part == "down" else "up")
    return lambda w, k, e: _rounding(hessians[e], compression)(w, k, e)


def _assign(model: Transformer, name: str, quantise: Quantiser, kind: Kind, whole: WholeBlock | None = None) -> None:
    """Replace a matrix, or each of a stack, by ``quantise(matrix, kind, its number)``."""
    module_name, _, part = name.rpartition(".")
    module, kind = model.get_submodule(module_name), kind_of(name, kind)
    value = module.get_parameter(part).detach()
    if not value.isfinite().all():
        raise CheckpointError(
            f"the weight '{name}' is not finite and cannot be put into {kind}; use another checkpoint"
        )
    if isinstance(module, Experts):
        numbers = range(len(value)) if whole is None else whole.experts(len(value))
        matrices = [quantise((value[e].T if part == "down" else value[e]).float(), kind, e) for e in numbers]
        wide = torch.tensor(any(matrix.has_wide_scales for matrix in matrices), dtype=torch.int32, device=value.device)
        wide = bool(model.axes.experts.ep.max_(wide))  # one format on all ranks
        scales = [matrix.scales.float() if wide else matrix.scales for matrix in matrices]
        values = torch.stack([matrix.values.view(torch.int8) for matrix in matrices]).view(matrices[0].values.dtype)
        stack = matrices[0]._replace(values=values, scales=torch.stack(scales))
        assign_quantised(module, name, stack if whole is None else whole.gather(stack))
    else:
        assert isinstance(module, QuantisableMatrix)
        assign_quantised(module, name, quantise(value.float(), kind, 0))


def _check(model: Transformer, compression: Compression) -> None:
    if (already := quantised_kind(model)) is not None:
        raise ConfigError(
            f"this model's weights are in {already} already; compress the model that it was made from (in Python, "
            "weights='dense' loads it dequantised)"
        )
    check_ranks(model)
    check_quantised(model.config, compression.weights, compression.weight_group, tp=1)


def _check_texts(inputs: int, compression: Compression, texts: Sequence[Tensor]) -> None:
    tokens, needed = sum(len(text) for text in texts), compression.min_tokens or inputs
    if tokens < needed:
        raise DataError(
            f"the calibration texts have {tokens:,} tokens, and a matrix of {inputs:,} inputs needs at least "
            f"{needed:,}; give more text, or --by nearest, which needs none"
        )
