"""Tensor-core skinny GEMMs, by Triton's interpreter: ``TRITON_INTERPRET=1 python -m tests.interpreted_tensor_core``.

See interpreted.py. The interpreter decodes values one by one where the inline assembly decodes two at once;
tests/unit/test_skinny_gemm_tensor_core.py shows that both give the same values.
"""

import itertools
import warnings

import torch
from torch import Tensor

from colonnade.kernels.linear import reference, skinny_gemm, skinny_gemm_tiles
from colonnade.kernels.linear.quantise import Quantised, quantise
from colonnade.kernels.linear.reference import Gate, NormWeights
from colonnade.kernels.linear.skinny_gemm_tiles import SkinnyTiles
from tests.all_codes import matrices_of_all_codes, tolerance
from tests.interpreted_fused import as_float64, draw

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
        x, weights[0], biases[0], tiles=tiles, norm=NormWeights(gain, 1e-5) if "n" in parts else None,
        gate=Gate(weights[1], biases[1], "silu") if "g" in parts else None, residual_TF=more,
    )  # fmt: skip
    wanted = reference.fused_linear(
        x.double(), weights[0], as_float64(biases[0]), norm=NormWeights(gain.double(), 1e-5) if "n" in parts else None,
        gate=Gate(weights[1], as_float64(biases[1]), "silu") if "g" in parts else None, residual_TF=as_float64(more),
    )  # fmt: skip
    error = float((got.double() - wanted).norm() / wanted.norm())
    # The interpreter truncates to bfloat16, where a GPU rounds.
    factor = 4 if dtype == torch.bfloat16 else 1
    assert got.dtype == dtype and error < factor * tolerance(dtype), (how, shape, rows, tiles, parts, dtype, error)


def check_products() -> int:
    """Few and many rows, one step or several, a partial last step, outputs that end within a block."""
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
    """Deterministic, for any number of programs and any other rows."""
    x = draw(7, 192).half()
    for kind in ("int8", "float8", "int4"):
        weight = quantise(draw(50, 192), kind, 32)
        tiles = SkinnyTiles(16, 32 if kind == "int4" else 128, 2, 2, tensor_cores=True)
        one, two, at_once = (skinny_gemm.launch(x, weight, tiles=tiles._replace(programs_per_sm=n)) for n in (1, 2, 0))
        assert torch.equal(one, two) and torch.equal(one, at_once)
        others = torch.cat((x[:4], 50 * draw(3, 192).half()))
        assert torch.equal(skinny_gemm.launch(others, weight, tiles=tiles)[:4], one[:4])
    return 3


def check_unsupported_cases() -> int:
    """float32, unaligned rows and more than sixteen rows use other kernels, whatever the table says."""
    count = 0
    skinny_gemm_tiles.OVERRIDE.append(SkinnyTiles(16, 32, 2, 2, tensor_cores=True))
    for (kind, inputs), rows, dtype in itertools.product(
        (("int4", 70), ("int8", 70), ("int8", 61)), (2, 9, 17), (torch.float32, torch.float16)
    ):
        x, weight = draw(rows, inputs).to(dtype), quantise(draw(20, inputs), kind, 32)  # type: ignore[arg-type]
        got, wanted = skinny_gemm.fused_linear(x, weight), reference.fused_linear(x.double(), weight)
        factor = 2e-3 if dtype == torch.float16 else 1e-4  # torch's GEMM dequantises to float16
        assert got.dtype == dtype and (got - wanted).norm() < factor * wanted.norm(), (kind, inputs, rows, dtype)
        count += 1
    skinny_gemm_tiles.OVERRIDE.clear()
    return count


def check_every_code() -> int:
    """Every code of each format, one at a time."""
    count = 0
    for dtype, weight in itertools.product(DTYPES, matrices_of_all_codes("cpu")):
        x, exact = torch.eye(weight.inputs, dtype=dtype), one_by_one(weight)
        tiles = SkinnyTiles(16, weight.values.shape[1], 2, 2, tensor_cores=True)
        got = torch.cat([skinny_gemm.launch(some, weight, tiles=tiles) for some in x.split(16)]).T
        if weight.kind == "float8" and dtype == torch.bfloat16:
            # Scaled by 2^−120 these are bfloat16 subnormals, which the interpreter misreads; see tests/gpu.
            exact, got = (torch.where(exact.abs() < 2**-6, 0, x) for x in (exact, got))
        assert torch.allclose(got.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3), (weight.kind, dtype)
        count += 1
    return count


def one_by_one(weight: Quantised) -> Tensor:
    return reference.fused_linear(torch.eye(weight.inputs, dtype=torch.float64), weight).T


if __name__ == "__main__":
    warnings.simplefilter("error")
    for check in (check_products, check_bits, check_unsupported_cases, check_every_code):
        print(f"{check.__name__}: {check()} cases", flush=True)
