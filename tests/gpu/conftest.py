"""Setup of the GPU tests: where there is no CUDA device, their files are skipped without being imported."""

from pathlib import Path
from typing import NoReturn

import pytest
import torch

from colonnade.kernels.cpu import kernels as cpu_kernels


class SkippedModule(pytest.Module):
    def collect(self) -> NoReturn:
        pytest.skip("needs a CUDA device", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if torch.cuda.is_available() else SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU runs the references: its C++ kernels round inputs of quantised products to int8, and a GPU does not."""
    monkeypatch.setattr(cpu_kernels, "available", lambda dtype: False)
