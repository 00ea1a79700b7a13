"""How other projects store quantised matrices: (q − z) s in integers, or small floats times scales.

    PackedIntegers   compressed-tensors "pack-quantized": 4 or 8 bits ascending in int32 words along the inputs, offset
                     by half the range; zero points packed along the outputs
    Scaled           int8 or float8 values as they are, with a scale per row, tensor or block: compressed-tensors
                     "int-quantized", "float-quantized", and DeepSeek's "fp8" blocks of 128 × 128
    Gptq             words along the inputs, (inputs / 8, outputs); version 1 stores zero − 1
    Awq              words along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7
    Mxfp4            e2m1 values, two in a byte, with a power of two per 32 inputs (OCP Microscaling)

Each class reads any box of a matrix, exactly: (q − z) s of a 4-bit integer and a 16-bit scale is a float32 number.
Matrices in forms that our kernels multiply are kept (:meth:`MatrixFormat.stored_format`); others are dequantised.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from colonnade.checkpoint.weight_mapping import Box, Shape, TensorSource
from colonnade.errors import CheckpointError
from colonnade.kernels.linear.quantise import Quantised, pack_int4, to_float
from colonnade.model.weight_only_quant import StoredFormat

Range = tuple[int, int]
SUPPORTED_GROUPS = (32, 64, 128)
"""Group sizes that the kernels multiply with."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, among eight, of each nibble of an AWQ word, from the lowest."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of the four bits of FP4."""
MX_GROUP = 32


class RawTensors(TensorSource, Protocol):
    """The tensors of a folder as they are stored."""

    def raw_dtype(self, name: str) -> str:
        """Dtype as safetensors calls it."""
        ...

    def read_raw(self, name: str, box: Box) -> Tensor:
        """Read a box of any dtype."""
        ...


class Integers(NamedTuple):
    """A box of a matrix: w = (q − z) s."""

    q: Tensor
    """int32 (rows, columns)."""
    zero: Tensor
    """int32 (rows, groups)."""
    scale: Tensor
    """(rows, groups)."""
    group: int

    def dense(self) -> Tensor:
        """The weights, float32."""
        wide = self.scale.float().repeat_interleave(self.group, 1)[:, : self.q.shape[1]]
        zero = self.zero.repeat_interleave(self.group, 1)[:, : self.q.shape[1]]
        return (self.q - zero).float() * wide

    def quantised(self, form: StoredFormat) -> Quantised:
        """The weights in the form that our kernels read."""
        scale = self.scale.float()
        if form.kind == "int8":
            return Quantised("int8", (self.q - self.zero).to(torch.int8), scale, self.q.shape[1], self.q.shape[1])
        pairs = torch.stack((scale, -self.zero.float() * scale), -1)
        pairs = pairs if form.wide_scales else pairs.bfloat16()
        return Quantised("int4", pack_int4(self.q, self.group), pairs, self.q.shape[1], self.group)


class MatrixFormat(Protocol):
    """One way to store a matrix under several names."""

    @property
    def marker(self) -> str:
        """The ending of the tensor that identifies a matrix in this format."""
        ...

    @property
    def endings(self) -> tuple[str, ...]:
        """The endings of all of its tensors."""
        ...

    def shape(self, raw: RawTensors, stem: str) -> Shape:
        """(F, D); raises :class:`CheckpointError` for tensors that do not match."""
        ...

    def stored_format(self, raw: RawTensors, stem: str) -> StoredFormat | None:
        """Our form of it; None if it is dequantised."""
        ...

    def align(self, raw: RawTensors, stem: str) -> int:
        """Columns are read in multiples of this."""
        ...

    def read(self, raw: RawTensors, stem: str, rows: Range, cols: Range) -> Integers | Quantised | Tensor:
        """The box, as integers, in our form, or dense."""
        ...


def require(raw: RawTensors, name: str, shape: Shape, dtypes: tuple[str, ...]) -> None:
    """Raise :class:`CheckpointError` unless ``raw`` has ``name`` in this shape and in one of ``dtypes``."""
    found = raw.shapes.get(name)
    if found is None:
        raise CheckpointError(f"{raw.file_of(name)} lacks the tensor '{name}' {list(shape)} of a quantised matrix")
    if found != shape or raw.raw_dtype(name) not in dtypes:
        raise CheckpointError(
            f"{raw.file_of(name)} contains '{name}' as {raw.raw_dtype(name)} {list(found)}, and quantization_config "
            f"implies {' or '.join(dtypes)} {list(shape)}; config and weights belong to different models"
        )


SCALE_DTYPES = ("F16", "BF16", "F32")


def _whole(shape: Shape) -> Box:
    return tuple((0, n) for n in shape)


def _nibbles(words: Tensor, bits: int = 4) -> Tensor:
    """(…, W) words to (…, W · 32/bits) values, the lowest bits first."""
    parts = [words >> bits * i & (1 << bits) - 1 for i in range(32 // bits)]
    return torch.stack(parts, -1).flatten(-2)


def _words(span: Range, per: int) -> Range:
    return span[0] // per, -(-span[1] // per)


def _trimmed(x: Tensor, dim: int, span: Range, per: int) -> Tensor:
    start = span[0] % per
    return x.narrow(dim, start, span[1] - span[0])


@dataclass(frozen=True)
class PackedIntegers:
    """compressed-tensors, "pack-quantized"."""

    bits: int
    group: int | None
    """None: one scale per row."""
    symmetric: bool
    marker: str = ".weight_packed"
    endings: tuple[str, ...] = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point")

    def shape(self, raw: RawTensors, stem: str) -> Shape:
        """(F, D)."""
        require(raw, f"{stem}.weight_shape", (2,), ("I64", "I32"))
        F, D = (int(n) for n in raw.read_raw(f"{stem}.weight_shape", ((0, 2),)).tolist())
        per, groups = 32 // self.bits, 1 if self.group is None else -(-D // self.group)
        require(raw, f"{stem}.weight_packed", (F, -(-D // per)), ("I32",))
        require(raw, f"{stem}.weight_scale", (F, groups), SCALE_DTYPES)
        if not self.symmetric:
            require(raw, f"{stem}.weight_zero_point", (-(-F // per), groups), ("I32",))
        return F, D

    def stored_format(self, raw: RawTensors, stem: str) -> StoredFormat | None:
        """int4 in groups, int8 by rows."""
        if self.bits == 4 and self.group in SUPPORTED_GROUPS:
            narrow = self.symmetric and raw.raw_dtype(f"{stem}.weight_scale") == "BF16"
            return StoredFormat(kind="int4", group=self.group, wide_scales=not narrow)
        if self.bits == 8 and self.group is None and self.symmetric:
            return StoredFormat(kind="int8", group=self.shape(raw, stem)[1])
        return None

    def align(self, raw: RawTensors, stem: str) -> int:
        """Whole groups and words."""
        return math.lcm(self.group or 1, 32 // self.bits)

    def read(self, raw: RawTensors, stem: str, rows: Range, cols: Range) -> Integers:
        """Integers, from 0 on."""
        per, half = 32 // self.bits, 1 << self.bits - 1
        words = raw.read_raw(f"{stem}.weight_packed", (rows, _words(cols, per)))
        q = _trimmed(_nibbles(words, self.bits), 1, cols, per)
        group = self.group or q.shape[1]
        groups = (0, 1) if self.group is None else _words(cols, self.group)
        scale = raw.read_raw(f"{stem}.weight_scale", (rows, groups))
        zero = torch.full(scale.shape, half, dtype=torch.int32)
        if not self.symmetric:
            packed = raw.read_raw(f"{stem}.weight_zero_point", (_words(rows, per), groups))
            zero = _trimmed(_nibbles(packed.T.contiguous(), self.bits).T, 0, rows, per)
        return Integers(q, zero, scale, group)


@dataclass(frozen=True)
class Scaled:
    """int8 or float8 values with scales per row, tensor or block."""

    marker: str = ".weight_scale"
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale."""
    dtypes: tuple[str, ...] = ("F8_E4M3",)
    keep: bool = True
    """False for integers with zero points."""

    @property
    def endings(self) -> tuple[str, ...]:
        """Values, scales, and tensors that only quantise activations."""
        return (".weight", self.marker, ".weight_zero_point", ".input_scale", ".input_zero_point")

    def shape(self, raw: RawTensors, stem: str) -> Shape:
        """(F, D)."""
        shape = raw.shapes.get(f"{stem}.weight", ())
        if len(shape) != 2:
            raise CheckpointError(f"{raw.file_of(stem)} has the scales, but not the matrix of '{stem}.weight'")
        F, D = shape
        require(raw, f"{stem}.weight", (F, D), self.dtypes)
        scales = raw.shapes[f"{stem}{self.marker}"]
        allowed: list[Shape] = [(F, 1), (F,), (1,), (1, 1), ()]
        if self.block is not None:
            allowed = [(-(-F // self.block[0]), -(-D // self.block[1]))]
        require(raw, f"{stem}{self.marker}", scales if scales in allowed else allowed[0], SCALE_DTYPES)
        return F, D

    def stored_format(self, raw: RawTensors, stem: str) -> StoredFormat | None:
        """8 bits by rows."""
        if self.block is not None or not self.keep:
            return None
        kind = "float8" if raw.raw_dtype(f"{stem}.weight") == "F8_E4M3" else "int8"
        return StoredFormat(kind=kind, group=raw.shapes[f"{stem}.weight"][1])

    def align(self, raw: RawTensors, stem: str) -> int:
        """Any columns."""
        return 1

    def read(self, raw: RawTensors, stem: str, rows: Range, cols: Range) -> Quantised | Tensor:
        """In our form, or dense if the scales are of blocks."""
        values = raw.read_raw(f"{stem}.weight", (rows, cols))
        name = f"{stem}{self.marker}"
        scales = raw.read_raw(name, _whole(raw.shapes[name])).float()
        if self.block is not None:
            tall, wide = self.block
            part = scales[rows[0] // tall : -(-rows[1] // tall), cols[0] // wide : -(-cols[1] // wide)]
            spread = part.repeat_interleave(tall, 0).repeat_interleave(wide, 1)
            spread = _trimmed(_trimmed(spread, 0, rows, tall), 1, cols, wide)
            return to_float(values, torch.float32) * spread
        scale = scales.reshape(-1, 1).expand(raw.shapes[f"{stem}.weight"][0], 1)[rows[0] : rows[1]].contiguous()
        if f"{stem}.weight_zero_point" in raw.shapes and not self.keep:
            zero_name = f"{stem}.weight_zero_point"
            zero = raw.read_raw(zero_name, _whole(raw.shapes[zero_name])).float().reshape(-1, 1)
            return (values.float() - zero.expand(raw.shapes[f"{stem}.weight"][0], 1)[rows[0] : rows[1]]) * scale
        kind = "float8" if values.dtype == torch.float8_e4m3fn else "int8"
        return Quantised(kind, values, scale, values.shape[1], values.shape[1])


@dataclass(frozen=True)
class Gptq:
    """GPTQ's files (AutoGPTQ, GPTQModel)."""

    group: int | None
    first_zero: int
    """Added to a stored zero point: 1 in version 1."""
    marker: str = ".qweight"
    endings: tuple[str, ...] = (".qweight", ".qzeros", ".scales", ".g_idx")

    def shape(self, raw: RawTensors, stem: str) -> Shape:
        """(F, D)."""
        stored = raw.shapes[f"{stem}.qweight"]
        if len(stored) != 2:
            raise CheckpointError(f"{raw.file_of(stem)} has '{stem}.qweight' of shape {list(stored)}, not a matrix")
        D, F = stored[0] * 8, stored[1]
        groups = 1 if self.group is None else -(-D // self.group)
        require(raw, f"{stem}.qweight", stored, ("I32",))
        require(raw, f"{stem}.scales", (groups, F), SCALE_DTYPES)
        require(raw, f"{stem}.qzeros", (groups, -(-F // 8)), ("I32",))
        if f"{stem}.g_idx" in raw.shapes:
            require(raw, f"{stem}.g_idx", (D,), ("I32", "I64"))
            order = raw.read_raw(f"{stem}.g_idx", ((0, D),)).long()
            if not torch.equal(order, torch.arange(D) // (self.group or D)):
                raise CheckpointError(
                    f"{raw.file_of(stem)}: the groups of '{stem}' are in activation order (g_idx, desc_act); "
                    "use a file that was made with desc_act false"
                )
        return F, D

    def stored_format(self, raw: RawTensors, stem: str) -> StoredFormat | None:
        """int4 in groups."""
        return StoredFormat(kind="int4", group=self.group, wide_scales=True) if self.group in SUPPORTED_GROUPS else None

    def align(self, raw: RawTensors, stem: str) -> int:
        """Whole groups and words."""
        return math.lcm(self.group or 1, 8)

    def read(self, raw: RawTensors, stem: str, rows: Range, cols: Range) -> Integers:
        """Integers, transposed to our order."""
        words = raw.read_raw(f"{stem}.qweight", (_words(cols, 8), rows))
        q = _trimmed(_nibbles(words.T.contiguous()), 1, cols, 8)
        groups = (0, 1) if self.group is None else _words(cols, self.group)
        scale = raw.read_raw(f"{stem}.scales", (groups, rows)).T
        packed = raw.read_raw(f"{stem}.qzeros", (groups, _words(rows, 8)))
        zero = _trimmed(_nibbles(packed), 1, rows, 8).T + self.first_zero
        return Integers(q, zero, scale.contiguous(), self.group or q.shape[1])


@dataclass(frozen=True)
class Awq:
    """AWQ's files, version "gemm"."""

    group: int | None
    marker: str = ".qweight"
    endings: tuple[str, ...] = (".qweight", ".qzeros", ".scales")

    def shape(self, raw: RawTensors, stem: str) -> Shape:
        """(F, D)."""
        stored = raw.shapes[f"{stem}.qweight"]
        if len(stored) != 2:
            raise CheckpointError(f"{raw.file_of(stem)} has '{stem}.qweight' of shape {list(stored)}, not a matrix")
        D, F = stored[0], stored[1] * 8
        groups = 1 if self.group is None else -(-D // self.group)
        require(raw, f"{stem}.qweight", stored, ("I32",))
        require(raw, f"{stem}.scales", (groups, F), SCALE_DTYPES)
        require(raw, f"{stem}.qzeros", (groups, stored[1]), ("I32",))
        return F, D

    def stored_format(self, raw: RawTensors, stem: str) -> StoredFormat | None:
        """int4 in groups."""
        return StoredFormat(kind="int4", group=self.group, wide_scales=True) if self.group in SUPPORTED_GROUPS else None

    def align(self, raw: RawTensors, stem: str) -> int:
        """Whole groups."""
        return self.group or 1

    def read(self, raw: RawTensors, stem: str, rows: Range, cols: Range) -> Integers:
        """Integers, transposed to our order."""
        of = _words(rows, 8)
        groups = (0, 1) if self.group is None else _words(cols, self.group)
        q = _trimmed(_awq_columns(raw.read_raw(f"{stem}.qweight", (cols, of))), 1, rows, 8).T
        zero = _trimmed(_awq_columns(raw.read_raw(f"{stem}.qzeros", (groups, of))), 1, rows, 8).T
        scale = raw.read_raw(f"{stem}.scales", (groups, rows)).T
        return Integers(q.contiguous(), zero, scale.contiguous(), self.group or q.shape[1])


def _awq_columns(words: Tensor) -> Tensor:
    """(…, W) words to (…, 8 W) values in the order of the columns."""
    values = _nibbles(words).unflatten(-1, (-1, 8))
    inverse = sorted(range(8), key=AWQ_ORDER.__getitem__)
    return values[..., inverse].flatten(-2)


@dataclass(frozen=True)
class Mxfp4:
    """compressed-tensors, "mxfp4-pack-quantized"."""

    marker: str = ".weight_packed"
    endings: tuple[str, ...] = (".weight_packed", ".weight_scale")

    def shape(self, raw: RawTensors, stem: str) -> Shape:
        """(F, D)."""
        stored = raw.shapes[f"{stem}.weight_packed"]
        if len(stored) != 2:
            raise CheckpointError(f"{raw.file_of(stem)} has '{stem}.weight_packed' of shape {list(stored)}")
        F, D = stored[0], stored[1] * 2
        require(raw, f"{stem}.weight_packed", stored, ("U8",))
        require(raw, f"{stem}.weight_scale", (F, -(-D // MX_GROUP)), ("U8",))
        return F, D

    def stored_format(self, raw: RawTensors, stem: str) -> StoredFormat | None:
        """Dequantised: no kernel multiplies it."""
        return None

    def align(self, raw: RawTensors, stem: str) -> int:
        """Whole groups."""
        return MX_GROUP

    def read(self, raw: RawTensors, stem: str, rows: Range, cols: Range) -> Tensor:
        """Dense."""
        packed = raw.read_raw(f"{stem}.weight_packed", (rows, _words(cols, 2)))
        exponents = raw.read_raw(f"{stem}.weight_scale", (rows, _words(cols, MX_GROUP)))
        return mxfp4_values(packed, exponents)[:, : cols[1] - cols[0]]


def mxfp4_values(packed: Tensor, exponents: Tensor) -> Tensor:
    """float32 (…, 2 B) of bytes (…, B) and exponents with bias 127 (…, B/16); an exponent of 255 is NaN."""
    table = torch.tensor(E2M1)
    values = table[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()]
    scale = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127).where(exponents != 255, torch.nan)
    return values * scale.repeat_interleave(MX_GROUP, -1)[..., : values.shape[-1]]
