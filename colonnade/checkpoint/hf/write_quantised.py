"""Quantised matrices as compressed-tensors files, which transformers (with its package) and vLLM read.

    int4      pack-quantized: eight values per word, a scale per group, zero points if the grid has any
    int8      pack-quantized, 8 bits, a scale per row
    float8    float-quantized, a scale per row
    int8_dynamic    int-quantized ("W8A8"), a scale per row, and one per token for the inputs

Only the blocks' matrices are written this way; an output projection, tied or not, is dequantised, as is usual there.
int4 on the affine grid has no integer zero points and is refused.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.checkpoint.weight_mapping import ParamMapping
from colonnade.config import ModelConfig
from colonnade.errors import ConfigError
from colonnade.kernels.linear.quantise import Quantised, unpack_int4


def written_quantised(quantised: Mapping[str, Quantised]) -> dict[str, Quantised]:
    """The model's quantised parameters that are written this way; raises :class:`ConfigError` for mixed formats."""
    found = {name: weight for name, weight in quantised.items() if name.startswith("blocks.")}
    if grouped := next((name for name, weight in found.items() if weight.has_int8_groups), None):
        raise ConfigError(
            f"'{grouped}' is int8 in groups, which this format does not support; use --format colonnade or gguf"
        )
    if formats := {(weight.kind, weight.group if weight.kind == "int4" else 0) for weight in found.values()}:
        if len(formats) > 1:
            raise ConfigError(
                f"the model mixes the formats {sorted(formats)}, and only one can be written; use --format colonnade"
            )
    return found


def quantization_config(weights: Mapping[str, Quantised], ignore: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a model with these matrices."""
    first = next(iter(weights.values()))
    symmetric = is_symmetric(weights.values())
    format = {"float8": "float-quantized", "int8_dynamic": "int-quantized"}.get(first.kind, "pack-quantized")
    args = {
        "num_bits": 4 if first.kind == "int4" else 8,
        "type": "float" if first.kind == "float8" else "int",
        "symmetric": symmetric,
        "strategy": "group" if first.kind == "int4" else "channel",
        "group_size": first.group if first.kind == "int4" else None,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    inputs = None
    if first.kind == "int8_dynamic":  # a scale per token there; ours has one per 32 inputs
        inputs = args | {"symmetric": True, "strategy": "token", "dynamic": True, "observer": None}
    group = {"targets": ["Linear"], "weights": args, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


def write_quantised(
    name: str, weight: Quantised, mapping: ParamMapping, config: ModelConfig, *, symmetric: bool
) -> dict[str, Tensor]:
    """The file's tensors of parameter ``name``; raises :class:`ConfigError` for what the format cannot represent."""
    if not mapping.keeps_inputs_last:
        raise ConfigError(
            f"'{config.family}' files transpose '{name}', which compressed-tensors cannot represent; write --format "
            "colonnade"
        )  # fmt: skip
    values = weight.values if weight.kind != "int4" else unpack_int4(weight)
    scale, zero = weight.scales, None
    if weight.kind == "int4":
        if weight.inputs % weight.group:
            raise ConfigError(
                f"'{name}' has {weight.inputs} inputs, and compressed-tensors needs whole groups of {weight.group}; "
                "use another --weight_group, or --format colonnade"
            )
        scale, zero = _scale_and_zero(name, weight)
    if weight.kind == "float8":
        values = values.view(torch.int8)  # not every torch can move float8
    rows = mapping.write_component(values, config)
    scales = mapping.write_component(scale, config)
    zeros = {} if zero is None or symmetric else mapping.write_component(zero, config)
    tensors: dict[str, Tensor] = {}
    for theirs, matrix in rows.items():
        stem = theirs.removesuffix(".weight")
        tensors[f"{stem}.weight_scale"] = scales[theirs].contiguous()
        if weight.kind == "float8":
            tensors[theirs] = matrix.contiguous().view(torch.float8_e4m3fn)
            continue
        if weight.kind == "int8_dynamic":
            tensors[theirs] = matrix.contiguous()
            continue
        tensors[f"{stem}.weight_packed"] = _packed(matrix if weight.kind == "int4" else matrix.int() + 128, weight.kind)
        tensors[f"{stem}.weight_shape"] = torch.tensor(matrix.shape)
        if theirs in zeros:
            tensors[f"{stem}.weight_zero_point"] = _packed(zeros[theirs].T, "int4").T.contiguous()
    return tensors


def _packed(values: Tensor, kind: str) -> Tensor:
    """Consecutive values in int32 words, the lowest bits first."""
    bits = 4 if kind == "int4" else 8
    per = 32 // bits
    parts = F.pad(values.int(), (0, -values.shape[-1] % per)).unflatten(-1, (-1, per))
    words = torch.zeros(parts.shape[:-1], dtype=torch.int32)
    for i in range(per):
        words |= parts[..., i] << bits * i
    return words.contiguous()


def _scale_and_zero(name: str, weight: Quantised) -> tuple[Tensor, Tensor]:
    scale, low = weight.scales.float().unbind(-1)
    zero = (-low / scale).round()
    if not torch.equal(-zero * scale, low) or zero.min() < 0 or zero.max() > 15:
        raise ConfigError(
            f"'{name}' has low values that are not multiples of its scales (--grid affine), which compressed-tensors "
            "cannot represent; compress with --grid symmetric or zero, or write --format colonnade"
        )
    return scale.bfloat16(), zero.int()  # every grid's scales are bfloat16 numbers


def is_symmetric(weights: Iterable[Quantised]) -> bool:
    """Whether no matrix needs zero points."""

    def centred(weight: Quantised) -> bool:
        scale, low = weight.scales.float().unbind(-1)
        return torch.equal(-8 * scale, low)

    return all(weight.kind != "int4" or centred(weight) for weight in weights)
