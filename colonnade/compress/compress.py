"""Quantises a loaded model, block after block, each calibrated on the outputs of the quantised ones before it.

    model = colonnade.load("smollm2")
    compress(model.transformer, Compression(weights="int4"), texts)
    colonnade.save(model, "folder")

The calibration texts must come from training data, never from evaluation data.
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
from colonnade.compress.sparse24 import GROUP, by_size, sparsegpt
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
    quantisable_shapes,
    quantised_kind,
    ternary_names,
)

Weights = Kind | Literal["sparse24"]
"""The target format: a quantised format, or zeros in two of every four inputs."""
FOLDABLE_FORMATS: tuple[Weights, ...] = ("int4", "int8_dynamic")
"""Formats for which folding has a rule."""


class Compression(Config):
    """How weights are quantised."""

    weights: Weights = "int4"
    """int8 and float8 with one scale per row, int4 with one per group of inputs; int8_dynamic also rounds inputs;
    ternary packs experts, and nothing else, into less than a bit a weight
    (:mod:`~colonnade.kernels.linear.ternary`); sparse24 keeps two of four consecutive inputs, unquantised
    (:mod:`~colonnade.compress.sparse24`)."""
    by: Literal["gptq", "fold", "nearest"] = "gptq"
    """gptq compensates each weight's rounding error in those not rounded yet; fold only scales inputs before rounding
    (AWQ for int4, SmoothQuant for int8_dynamic); both need calibration text. nearest rounds each weight separately."""
    weight_group: WeightGroup = 64
    """int4: consecutive inputs that share a scale."""
    word: Literal[18, 24, 32] = 18
    """ternary: weights per 16-bit word; at most 4, 3 and 3 of them are nonzero."""
    grid: GridKind = "affine"
    """int4: a low value per group (affine), an integer zero point per group (zero), or the zero point 8 (symmetric)."""
    fold: bool = True
    """gptq: scale inputs first, for int4 by AWQ's rule, for int8_dynamic by SmoothQuant's."""
    min_tokens: int | None = Field(default=None, gt=0)
    """Tokens that a calibration needs; None: as many as the widest matrix has inputs."""

    @property
    def group(self) -> int:
        """Consecutive inputs that share a scale, or a word."""
        return self.word if self.weights == "ternary" else self.weight_group


@torch.no_grad()
def compress(
    model: Transformer,
    compression: Compression,
    texts: Sequence[Tensor] = (),
    progress: Callable[[int, int], object] = lambda _done, _of: None,
) -> None:
    """Quantise ``model``, in float32, in place; ``texts`` are int64 token ids (T,).

    Several ranks share texts over dp and experts over ep; each passes all ``texts``, and the result is bitwise that of
    one process. ``progress(done, of)`` is called after each block. Raises :class:`ConfigError` for a model that is
    already quantised or that cannot be, :class:`PlanError` for any other layout, and :class:`DataError` for too little
    or unusable text.
    """
    _check(model, compression)
    if compression.by == "fold":
        check_fold(compression.weights)
    kind = compression.weights
    modules = quantisable_modules(model)
    if kind == "ternary":
        modules = {name: modules[name] for name in ternary_names(model)}
    elif kind == "sparse24":
        modules = {name: module for name, module in modules.items() if name.startswith("blocks.")}
    if compression.by == "nearest":
        for name in modules:
            _assign(model, name, _rounding(None, compression), kind)
        return
    folds = kind in FOLDABLE_FORMATS and (compression.fold or compression.by == "fold")
    _check_texts(modules_inputs(model), compression, texts)
    runner = BlockRunner(model, texts)
    for layer in range(model.config.layers):
        with WholeBlock(model, layer).restored() as whole:
            statistics = runner.gather(layer)
            if folds and kind != "sparse24":
                fold(whole.block, statistics, kind, compression.group, compression.grid)
            prefix = f"blocks.{layer}."
            for name in (name for name in modules if name.startswith(prefix)):
                _assign(model, name, _quantiser(name, statistics, compression), kind, whole)
            runner.advance(layer)
        progress(layer + 1, model.config.layers)
    for name in (name for name in modules if not name.startswith("blocks.")):  # the output projection
        hessian = None if compression.by == "fold" else runner.hidden_moments().hessian
        _assign(model, name, _rounding(hessian, compression), kind)


def check_fold(weights: Weights) -> None:
    """Raise :class:`ConfigError` unless there is a rule to fold scales for ``weights``."""
    if weights not in FOLDABLE_FORMATS:
        raise ConfigError(
            f"there is no rule for folding scales for {weights}, only for {' and '.join(FOLDABLE_FORMATS)}; "
            "use --by gptq or nearest"
        )


def modules_inputs(model: Transformer) -> int:
    """The largest number of inputs of a dense matrix of ``model``'s blocks."""
    return max(
        module.get_parameter("weight").shape[1]
        for name, module in quantisable_modules(model).items()
        if not isinstance(module, Experts) and name.startswith("blocks.")
    )


Quantiser = Callable[[Tensor, Weights, int], Quantised | Tensor]
"""Called with a matrix, its format, and its number in a stack; sparse matrices are tensors."""


def _rounding(hessian: Tensor | None, compression: Compression) -> Quantiser:
    """GPTQ with ``hessian``; without one, rounding to nearest."""
    group, grid = compression.group, compression.grid

    def run(w_FD: Tensor, kind: Weights, _number: int) -> Quantised | Tensor:
        if kind == "sparse24":
            return by_size(w_FD) if hessian is None else sparsegpt(w_FD, hessian)
        return nearest(w_FD, kind, group, grid) if hessian is None else gptq(w_FD, hessian, kind, group, grid)

    return run


def _quantiser(name: str, statistics: InputStatistics, compression: Compression) -> Quantiser:
    module, _, part = name.rpartition(".")
    local = module.split(".", 2)[2]  # the name within the block
    if compression.by == "fold":
        return _rounding(None, compression)
    if local not in statistics.experts:
        return _rounding(statistics.linears[local].hessian, compression)
    hessians = statistics.expert_hessians(local, "down" if part == "down" else "up")
    return lambda w, k, e: _rounding(hessians[e], compression)(w, k, e)


def _assign(model: Transformer, name: str, quantise: Quantiser, kind: Weights, whole: WholeBlock | None = None) -> None:
    """Replace a matrix, or each of a stack, by ``quantise(matrix, kind, its number)``."""
    module_name, _, part = name.rpartition(".")
    module, kind = model.get_submodule(module_name), kind if kind == "sparse24" else kind_of(name, kind)
    value = module.get_parameter(part).detach()
    if not value.isfinite().all():
        raise CheckpointError(
            f"the weight '{name}' is not finite and cannot be quantised to {kind}; use another checkpoint"
        )
    if isinstance(module, Experts):
        numbers = range(len(value)) if whole is None else whole.experts(len(value))
        found = [quantise((value[e].T if part == "down" else value[e]).float(), kind, e) for e in numbers]
        matrices = [matrix for matrix in found if isinstance(matrix, Quantised)]
        if not matrices:
            parts = torch.stack([matrix.T if part == "down" else matrix for matrix in found])  # type: ignore[union-attr]
            value.copy_(parts if whole is None else whole.gather_tensor(parts))
            return
        wide = torch.tensor(any(matrix.has_wide_scales for matrix in matrices), dtype=torch.int32, device=value.device)
        wide = bool(model.axes.experts.ep.max_(wide))  # one format on all ranks
        scales = [matrix.scales.float() if wide else matrix.scales for matrix in matrices]
        values = torch.stack([matrix.values.view(torch.int8) for matrix in matrices]).view(matrices[0].values.dtype)
        stack = matrices[0]._replace(values=values, scales=torch.stack(scales))
        assign_quantised(module, name, stack if whole is None else whole.gather(stack))
    else:
        assert isinstance(module, QuantisableMatrix)
        matrix = quantise(value.float(), kind, 0)
        if isinstance(matrix, Quantised):
            assign_quantised(module, name, matrix)
        else:
            value.copy_(matrix)


def _check(model: Transformer, compression: Compression) -> None:
    if (already := quantised_kind(model)) is not None:
        raise ConfigError(
            f"this model's weights are already in {already}; compress the model that it was made from (in Python, "
            "weights='dense' loads it dequantised)"
        )
    check_ranks(model)
    if compression.weights != "sparse24":
        check_quantised(model.config, compression.weights, compression.group, tp=1)
        return
    for name, (_count, _outputs, inputs) in quantisable_shapes(model).items():
        if name.startswith("blocks.") and inputs % GROUP:
            raise ConfigError(f"sparse24 needs inputs in groups of four, and '{name}' has {inputs}; use --weights int4")


def _check_texts(inputs: int, compression: Compression, texts: Sequence[Tensor]) -> None:
    tokens, needed = sum(len(text) for text in texts), compression.min_tokens or inputs
    if tokens < needed:
        raise DataError(
            f"the calibration texts have {tokens:,} tokens, and a matrix of {inputs:,} inputs needs at least "
            f"{needed:,}; raise --tokens, use more text, or use --by nearest, which needs none"
        )
