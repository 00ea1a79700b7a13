"""Triton kernels checked without a GPU by Triton's interpreter (tests/interpreted*.py)."""

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interpreter import CHECKS, Interpreter, started

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """One process for all modules, because importing torch and Triton takes seconds."""
    process = started or Interpreter()
    yield process
    if process is not started:
        process.end()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton")
@pytest.mark.parametrize(("module", "checks"), CHECKS.items())
def test_interpreted_kernels_match_their_references(interpreter: Interpreter, module: str, checks: int) -> None:
    code, output = interpreter.run(module)
    assert code == 0, output
    assert output.count(" cases") == checks, output


@pytest.mark.sample(1)
@pytest.mark.skipif(sys.platform != "linux", reason="guards memory by Linux's mprotect")
@pytest.mark.parametrize("side", ["end", "begin"])
def test_out_of_bounds_read_ends_the_process(side: str) -> None:
    """So interpreted kernels that pass read nothing beyond their tensors."""
    command = [sys.executable, "-m", "tests.guard_pages", side]
    ran = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ran.stdout, ran.returncode) == ("guarded\n", -signal.SIGSEGV), ran.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton")
def test_sanitizer_cases_can_be_built() -> None:
    """The sanitizer itself needs a GPU (tests/gpu/test_sanitizer_gpu.py); this checks its cases on any machine."""
    from tests.sanitizer_runs import CASES

    assert all(case.made() for _, case, _ in CASES)
