"""The contract of the experts' kernels: every row of the table computes what the reference does, and its gradients.

Kernels in Triton are held to the same cases by tests/interpreted.py.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from colonnade.kernels.choose import TABLE, Row
from colonnade.kernels.experts import reference
from colonnade.kernels.experts.reference import ACTIVATIONS
from tests.experts import LOADS, Case, experts_of_rows, gradients, routed_experts

ROWS = [
    pytest.param(row, dtype, id=f"{row.operation}-{row.name}-{str(dtype).removeprefix('torch.')}")
    for row in TABLE
    if row.operation in ("experts", "routed_experts") and row.name != "reference" and "cpu" in row.devices
    for dtype in ((torch.float64 if torch.float64 in row.dtypes else torch.float32),)
]
SHAPES = [(37, 2, 5, 24, 20), (9, 3, 8, 16, 32), (1, 2, 4, 7, 9), (0, 2, 3, 8, 8), (40, 1, 4, 10, 6)]
"""(tokens, choices, experts, width, hidden width)"""


def error(got: Tensor, exact: Tensor) -> float:
    """max|Δ| over max(1, ‖exact‖∞)."""
    return float((got.double() - exact).abs().max() / exact.abs().max().clamp(min=1)) if exact.numel() else 0.0


def of(row: Row) -> Callable[..., Tensor]:
    return routed_experts(row.run) if row.operation == "routed_experts" else experts_of_rows(row.run)


@pytest.mark.parametrize(("row", "dtype"), ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("gated", "biased"), list(itertools.product([True, False], repeat=2)))
def test_experts(row: Row, dtype: torch.dtype, shape: tuple, load: str, gated: bool, biased: bool) -> None:
    activation = list(ACTIVATIONS)[(shape[0] + gated + 2 * biased) % 4]
    case = Case(*shape, load=load, gated=gated, biased=biased, activation=activation)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    exact = gradients(routed_experts(reference.routed), case, torch.float64)
    for name, got in gradients(of(row), case, dtype).items():
        assert error(got, exact[name]) <= tolerance, name


@pytest.mark.parametrize(("row", "dtype"), ROWS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(row: Row, dtype: torch.dtype, activation: str) -> None:
    case = Case(20, 2, 4, 12, 14, activation=activation)
    exact = gradients(routed_experts(reference.routed), case, torch.float64)
    for name, got in gradients(of(row), case, dtype).items():
        assert error(got, exact[name]) <= (1e-10 if dtype == torch.float64 else 1e-5), name
