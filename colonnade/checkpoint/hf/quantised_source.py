"""The tensors of a Hugging Face folder whose matrices are quantised, and the parsing of its quantization_config.

Supported are compressed-tensors (pack-quantized, int-quantized, float-quantized, mxfp4-pack-quantized), GPTQ, AWQ and
DeepSeek's float8 blocks. Each matrix appears under its usual name, NAME.weight, in its usual shape.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from colonnade.checkpoint.hf.quantised_formats import (
    Awq,
    Gptq,
    Integers,
    MatrixFormat,
    Mxfp4,
    PackedIntegers,
    RawTensors,
    Scaled,
)
from colonnade.checkpoint.weight_mapping import Box, Shape
from colonnade.errors import CheckpointError
from colonnade.kernels.linear.quantise import Quantised, dequantise
from colonnade.model.weight_only_quant import StoredFormat

METHODS = ("compressed-tensors", "gptq", "awq", "fp8")


class QuantisedSource:
    """Tensors of ``raw``; those in ``format`` are quantised matrices.

    Raises :class:`CheckpointError` for components that do not match.
    """

    def __init__(self, raw: RawTensors, format: MatrixFormat):
        self._raw, self._format = raw, format
        stems = [name.removesuffix(format.marker) for name in raw.shapes if name.endswith(format.marker)]
        components = {f"{stem}{ending}" for stem in stems for ending in format.endings}
        self._stems = {f"{stem}.weight": stem for stem in stems}
        plain = {name: shape for name, shape in raw.shapes.items() if name not in components}
        self.shapes: dict[str, Shape] = plain | {name: format.shape(raw, stem) for name, stem in self._stems.items()}

    def file_of(self, name: str) -> str:
        """The file that contains, or should contain, ``name``."""
        stem = self._stems.get(name)
        return self._raw.file_of(name if stem is None else f"{stem}{self._format.marker}")

    def read(self, name: str, box: Box) -> Tensor:
        """One box of one tensor, dequantised to float32 without rounding."""
        stem = self._stems.get(name)
        if stem is None:
            return self._raw.read(name, box)
        rows, (start, stop) = box
        align = self._format.align(self._raw, stem)
        first, last = start - start % align, min(stop + -stop % align, self.shapes[name][1])
        found = self._format.read(self._raw, stem, rows, (first, last))
        if isinstance(found, Integers):
            found = found.dense()
        elif isinstance(found, Quantised):
            found = dequantise(found, found.scales.dtype)
        return found[:, start - first : stop - first]

    def stored_format(self, name: str) -> StoredFormat | None:
        """The form in which a tensor is kept; None if it is dense, or dequantised."""
        stem = self._stems.get(name)
        return None if stem is None else self._format.stored_format(self._raw, stem)

    def read_quantised(self, name: str, box: Box) -> Quantised:
        """One box, in whole groups, of a tensor that is kept quantised."""
        stem, form = self._stems[name], self.stored_format(name)
        assert form is not None, name
        found = self._format.read(self._raw, stem, *box)
        if isinstance(found, Integers):
            return found.quantised(form)
        assert isinstance(found, Quantised)
        return found


def parse_quantization(raw: object, file: str) -> MatrixFormat:
    """The format that a ``quantization_config`` describes; raises :class:`CheckpointError` for others."""
    if not isinstance(raw, Mapping):
        raise _refuse(file, f"is {raw!r}, not an object")
    method = raw.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(raw, file)
    if method == "gptq":
        if raw.get("bits") != 4:
            raise _refuse(file, f"has GPTQ weights of {raw.get('bits')!r} bits, and only 4 is supported")
        version2 = raw.get("checkpoint_format") == "gptq_v2"
        return Gptq(_group(raw.get("group_size"), file), 0 if version2 else 1)
    if method == "awq":
        version = str(raw.get("version", "gemm")).lower()
        if raw.get("bits", raw.get("w_bit")) != 4 or version != "gemm":
            raise _refuse(file, f"has AWQ weights of {raw.get('bits')!r} bits in version {version!r}, not 4 and 'gemm'")
        return Awq(_group(raw.get("group_size", raw.get("q_group_size")), file))
    if method == "fp8":
        block = raw.get("weight_block_size")
        if block is None:
            return Scaled(marker=".weight_scale")
        if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise _refuse(file, f"has weight_block_size {block!r}, not two positive numbers")
        return Scaled(marker=".weight_scale_inv", block=(block[0], block[1]))
    raise _refuse(file, f"has the method {method!r}, and only {', '.join(METHODS)} are supported")


def _compressed_tensors(raw: Mapping[str, Any], file: str) -> MatrixFormat:
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refuse(file, "does not have exactly one config_groups entry, and all matrices must have one format")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _refuse(file, "has a config group without weights")
    format = group.get("format") or raw.get("format")
    bits, symmetric = weights.get("num_bits"), weights.get("symmetric", True)
    strategy = weights.get("strategy")
    if weights.get("actorder") == "group":
        raise _refuse(file, "has groups in activation order (actorder group); use a file without")
    size = weights.get("group_size") if strategy == "group" else None
    if strategy == "group" and format != "mxfp4-pack-quantized" and _group(size, file) is None:
        raise _refuse(file, f"has groups of {size!r} inputs")
    if format == "pack-quantized" and bits in (4, 8) and strategy in ("group", "channel"):
        return PackedIntegers(bits, _group(size, file), bool(symmetric))
    if format == "mxfp4-pack-quantized" and size == 32:
        return Mxfp4()
    if format == "int-quantized" and bits == 8 and strategy in ("channel", "tensor"):
        return Scaled(dtypes=("I8",), keep=bool(symmetric))
    if format == "float-quantized" and bits == 8 and strategy in ("channel", "tensor"):
        return Scaled()
    if format == "float-quantized" and bits == 8 and strategy == "block":
        block = weights.get("block_structure")
        if isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
            return Scaled(block=(block[0], block[1]))
    raise _refuse(file, f"has {bits!r} bits in the format {format!r} by {strategy!r}, which is not supported")


def _group(size: object, file: str) -> int | None:
    if size in (None, -1):
        return None
    if not isinstance(size, int) or isinstance(size, bool) or not 8 <= size <= 1 << 20 or size % 8:
        raise _refuse(file, f"has groups of {size!r} inputs")
    return size


def _refuse(file: str, what: str) -> CheckpointError:
    return CheckpointError(f"{file}: quantization_config {what}; use the original checkpoint, or another of its files")
