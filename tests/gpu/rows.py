"""Registered GPU kernels as test parameters (row, dtype)."""

from typing import Any

import pytest

from colonnade.kernels.registry import KERNELS


def rows(operation: str) -> list[Any]:
    """Every kernel of ``operation`` except the reference, in every dtype."""
    return [
        pytest.param(row, dtype, id=f"{row.name}-{str(dtype).removeprefix('torch.')}")
        for row in KERNELS
        if row.operation == operation and row.name != "reference" and "cuda" in row.devices
        for dtype in row.dtypes
    ]
