"""Fixtures of the GPU tests."""

import pytest

from colonnade.kernels.cpu import kernels as cpu_kernels


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU runs the references: its C++ kernels round inputs of quantised products to int8, and a GPU does not."""
    monkeypatch.setattr(cpu_kernels, "available", lambda dtype: False)
