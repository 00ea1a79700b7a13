"""Implementations that run on a GPU, as the parameters (row, dtype) of a test."""

from typing import Any

import pytest

from colonnade.kernels.registry import KERNELS


def rows(operation: str) -> list[Any]:
    """All of ``operation`` but the reference, in every type."""
    return [
        pytest.param(row, dtype, id=f"{row.name}-{str(dtype).removeprefix('torch.')}")
        for row in KERNELS
        if row.operation == operation and row.name != "reference" and "cuda" in row.devices
        for dtype in row.dtypes
    ]
