"""Products with quantised weights, run by Triton's interpreter (see interpreted.py).

Tiles are small, so that inputs and outputs end within one, and inputs are cut into several splits.
"""

import itertools
import warnings

import torch

from colonnade.kernels.linear import quantised, quantised_gpu
from colonnade.kernels.linear.quantise import quantise
from colonnade.kernels.linear.quantised_gpu import Tiles

SHAPES = [(40, 96), (16, 64), (7, 50), (33, 300)]
HOW = {"int4": Tiles(16, 16, 4, 2), "int8": Tiles(16, 32, 4, 2), "float8": Tiles(16, 32, 4, 2)}


def case(kind: str, rows: int, outputs: int, inputs: int, group: int, splits: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(rows + outputs)
    weight = quantise(torch.randn(outputs, inputs, generator=draw), kind, group)
    x = torch.randn(rows, 2 * inputs, generator=draw).to(dtype)[:, :inputs]
    exact = quantised.linear(x.double(), weight)
    got = quantised_gpu.few_rows(x, weight, HOW[kind], splits)
    error = float((got.double() - exact).norm() / exact.norm())
    # One row of int4 is summed beside 2048 times itself; the matrix units are given weights rounded to the type of x.
    tolerance = 1e-3 if dtype == torch.float16 else 1e-4 if kind == "int4" and rows == 1 else 1e-6
    assert got.dtype == dtype and error < tolerance, (kind, rows, outputs, error)


def check_one_row() -> int:
    count = 0
    for (outputs, inputs), (kind, group), splits in itertools.product(
        SHAPES, (("int8", 32), ("int4", 32), ("int4", 64), ("int4", 128), ("float8", 32)), (1, 3)
    ):
        case(kind, 1, outputs, inputs, group, splits, torch.float16 if inputs == 50 else torch.float32)
        count += 1
    return count


def check_more_rows() -> int:
    count = 0
    for (outputs, inputs), (kind, group), rows in itertools.product(
        SHAPES[1:], (("int8", 32), ("int4", 32), ("int4", 128), ("float8", 32)), (2, 17)
    ):
        case(kind, rows, outputs, inputs, group, 1 + count % 3, torch.float16 if inputs == 64 else torch.float32)
        count += 1
    return count


def check_the_row_of_the_table() -> int:
    """Any number of rows, a bias, more dimensions; none at all."""
    weight, bias = quantise(torch.randn(24, 70), "int4", 32), torch.randn(24)
    for shape in ((70,), (1, 70), (3, 70), (2, 5, 70), (65, 70), (0, 70)):
        x = torch.randn(shape)
        exact = quantised.linear(x.double(), weight, bias.double())
        got = quantised_gpu.linear(x, weight, bias)
        assert got.shape == exact.shape and (got - exact).norm() <= 1e-4 * exact.norm()
    return 6


if __name__ == "__main__":
    warnings.simplefilter("error")
    for check in (check_one_row, check_more_rows, check_the_row_of_the_table):
        print(f"{check.__name__}: {check()} cases", flush=True)
