"""Quantised parameters in native checkpoints: each is two tensors, NAME.values and NAME.scales."""

from collections.abc import Iterator

import torch
from torch import Tensor

from colonnade.kernels.linear.quantise import INT4_PER_WORD, Quantised
from colonnade.model.weight_only_quant import StoredFormat

VALUES, SCALES = ".values", ".scales"
"""Suffixes of the two tensors of a quantised parameter."""


def components(name: str, weight: Quantised) -> Iterator[tuple[str, Tensor]]:
    """The two tensors of parameter ``name`` in a checkpoint, where it is quantised."""
    yield f"{name}{VALUES}", weight.values
    yield f"{name}{SCALES}", weight.scales


def component_specs(key: str, form: StoredFormat, shape: torch.Size) -> list[tuple[str, torch.Size, torch.dtype]]:
    """(name, shape, dtype) of the two tensors of the quantised parameter ``key`` of ``shape``."""
    names = f"{key}{VALUES}", f"{key}{SCALES}"
    dtypes = _component_dtypes(form)
    return [(name, component_shape(name, form, shape), dtype) for name, dtype in zip(names, dtypes, strict=True)]


def component_shape(key: str, form: StoredFormat, shape: torch.Size) -> torch.Size:
    """The whole shape of a component, named ``key``, of a quantised parameter of the whole ``shape``."""
    *lead, outputs, inputs = (shape[0], shape[2], shape[1]) if is_transposed(key, shape) else shape
    groups, int4 = -(-inputs // form.group), form.kind == "int4"
    if key.endswith(VALUES):
        words = groups * form.group // INT4_PER_WORD if int4 else groups if form.kind == "ternary" else inputs
        return torch.Size((*lead, outputs, words))
    return torch.Size((*lead, outputs, groups, 2) if int4 else (*lead, outputs, groups if form.grouped else 1))


def has_groups(form: StoredFormat) -> bool:
    """Whether inputs are stored in groups, or in words of several."""
    return form.grouped or form.kind in ("int4", "ternary")


def is_transposed(key: str, shape: torch.Size) -> bool:
    """Whether a parameter is a stack that is stored inputs first."""
    return len(shape) == 3 and key.removesuffix(VALUES).removesuffix(SCALES).endswith(".down")


def _component_dtypes(form: StoredFormat) -> tuple[torch.dtype, torch.dtype]:
    values = {"int4": torch.int32, "float8": torch.float8_e4m3fn, "ternary": torch.int16}.get(form.kind, torch.int8)
    narrow = form.kind == "ternary" or (form.kind == "int4" and not form.wide_scales)
    return values, torch.bfloat16 if narrow else torch.float32


def empty_quantised(key: str, form: StoredFormat, shape: torch.Size, device: torch.device) -> Quantised:
    """An uninitialised quantised parameter of this rank's ``shape``."""
    specs = component_specs(key, form, shape)
    values, scales = (torch.empty(size, dtype=dtype, device=device) for _, size, dtype in specs)
    inputs = shape[1] if len(shape) == 2 or key.endswith(".down") else shape[2]
    return Quantised(form.kind, values, scales, inputs, form.group if has_groups(form) else inputs)
