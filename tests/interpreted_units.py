"""Products on the matrix units, by Triton's interpreter: ``TRITON_INTERPRET=1 python -m tests.interpreted_units``.

See interpreted.py. Where the assembler would make numbers of two halves at once the interpreter makes them one by one;
that both do the same is shown by tests/unit/test_skinny_gemm_tensor_core.py.
"""

import itertools
import warnings

import torch
from torch import Tensor

from colonnade.kernels.linear import reference, skinny_gemm, skinny_gemm_tiles
from colonnade.kernels.linear.quantise import Quantised, quantise
from colonnade.kernels.linear.reference import Gate, RmsNorm
from colonnade.kernels.linear.skinny_gemm_tiles import SkinnyTiles
from tests.interpreted_fused import draw, exactly
from tests.units import codes, tolerance

KINDS = [("int8", 64), ("float8", 64), ("int4", 32), ("int4", 64), ("int4", 128)]
DTYPES = torch.float16, torch.bfloat16


def case(
    how: tuple[str, int], shape: tuple[int, int], rows: int, tiles: SkinnyTiles, *, parts: str, dtype: torch.dtype
) -> None:
    (kind, group), (F, D) = how, shape
    weights = [quantise(draw(*shape) / D**0.5, kind, group) for _ in range(2)]  # type: ignore[arg-type]
    biases = [draw(F).to(dtype) if "b" in parts else None for _ in range(2)]
    x, gain = draw(rows, 2 * D).to(dtype)[:, :D], draw(D).to(dtype)
    more = draw(rows, F).to(dtype) if "r" in parts else None
    got = skinny_gemm.launch(
        x, weights[0], biases[0], tiles=tiles, norm=RmsNorm(gain, 1e-5) if "n" in parts else None,
        gate=Gate(weights[1], biases[1], "silu") if "g" in parts else None, residual_TF=more,
    )  # fmt: skip
    wanted = reference.fused_linear(
        x.double(), weights[0], exactly(biases[0]), norm=RmsNorm(gain.double(), 1e-5) if "n" in parts else None,
        gate=Gate(weights[1], exactly(biases[1]), "silu") if "g" in parts else None, residual_TF=exactly(more),
    )  # fmt: skip
    error = float((got.double() - wanted).norm() / wanted.norm())
    # The interpreter cuts what does not fit into bfloat16 off, where a GPU rounds.
    room = 4 if dtype == torch.bfloat16 else 1
    assert got.dtype == dtype and error < room * tolerance(dtype), (how, shape, rows, tiles, parts, dtype, error)


def check_products() -> int:
    """Few and many rows, all inputs at once and in steps, a last step that is not full, outputs that end in a block."""
    count = 0
    ways = ["", "n", "r", "ng", "gb", "nbr", "ngbr"]
    for i, (how, dtype, rows) in enumerate(itertools.product(KINDS, DTYPES, (1, 3, 16))):
        step = (16, 64, 1024)[i % 3] * (1 if how[0] == "int4" else 8)
        shape = ((40, 318), (16, 512), (33, 130))[(i // 3) % 3]
        tiles = SkinnyTiles(16 << i % 2, step, (1, 4, 2)[i // 2 % 3], 2, i % 3, tensor_cores=True)
        case(how, shape, rows, tiles, parts=ways[i % len(ways)], dtype=dtype)
        count += 1
    return count


def check_bits() -> int:
    """The same bits each time, whatever the number of programs and the other rows."""
    x = draw(7, 192).half()
    for kind in ("int8", "float8", "int4"):
        weight = quantise(draw(50, 192), kind, 32)
        tiles = SkinnyTiles(16, 32 if kind == "int4" else 128, 2, 2, tensor_cores=True)
        one, two, at_once = (skinny_gemm.launch(x, weight, tiles=tiles._replace(programs_per_sm=n)) for n in (1, 2, 0))
        assert torch.equal(one, two) and torch.equal(one, at_once)
        others = torch.cat((x[:4], 50 * draw(3, 192).half()))
        assert torch.equal(skinny_gemm.launch(others, weight, tiles=tiles)[:4], one[:4])
    return 3


def check_what_is_not_for_them() -> int:
    """float32, rows of an odd number of bytes and more than sixteen rows go to other kernels, whatever the table."""
    count = 0
    skinny_gemm_tiles.OVERRIDE.append(SkinnyTiles(16, 32, 2, 2, tensor_cores=True))
    for (kind, inputs), rows, dtype in itertools.product(
        (("int4", 70), ("int8", 70), ("int8", 61)), (2, 9, 17), (torch.float32, torch.float16)
    ):
        x, weight = draw(rows, inputs).to(dtype), quantise(draw(20, inputs), kind, 32)  # type: ignore[arg-type]
        got, wanted = skinny_gemm.fused_linear(x, weight), reference.fused_linear(x.double(), weight)
        room = 2e-3 if dtype == torch.float16 else 1e-4  # the library's widen weights to float16
        assert got.dtype == dtype and (got - wanted).norm() < room * wanted.norm(), (kind, inputs, rows, dtype)
        count += 1
    skinny_gemm_tiles.OVERRIDE.clear()
    return count


def check_every_code() -> int:
    """Each number that a format has, one at a time."""
    count = 0
    for dtype, weight in itertools.product(DTYPES, codes("cpu")):
        x, exact = torch.eye(weight.inputs, dtype=dtype), one_by_one(weight)
        tiles = SkinnyTiles(16, weight.values.shape[1], 2, 2, tensor_cores=True)
        got = torch.cat([skinny_gemm.launch(some, weight, tiles=tiles) for some in x.split(16)]).T
        if weight.kind == "float8" and dtype == torch.bfloat16:
            # 2^−120 of these is below bfloat16's normal numbers, which the interpreter reads wrongly; see tests/gpu.
            exact, got = (torch.where(exact.abs() < 2**-6, 0, x) for x in (exact, got))
        assert torch.allclose(got.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3), (weight.kind, dtype)
        count += 1
    return count


def one_by_one(weight: Quantised) -> Tensor:
    return reference.fused_linear(torch.eye(weight.inputs, dtype=torch.float64), weight).T


if __name__ == "__main__":
    warnings.simplefilter("error")
    for check in (check_products, check_bits, check_what_is_not_for_them, check_every_code):
        print(f"{check.__name__}: {check()} cases", flush=True)
