"""Kernels written in Triton, checked without a GPU by its interpreter (tests/interpreted.py and its neighbour)."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton")
@pytest.mark.parametrize(
    ("module", "checks"),
    [
        ("interpreted", 5),
        ("interpreted_experts", 11),
        ("interpreted_decode", 13),
        ("interpreted_cascade", 7),
        ("interpreted_latent", 5),
        ("interpreted_fused", 7),
        ("interpreted_units", 4),
        ("interpreted_quantised", 8),
        ("interpreted_ranks", 3),
    ],
)
def test_interpreted_kernels_equal_their_references(module: str, checks: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", f"tests.{module}"],
        check=False, cwd=ROOT, capture_output=True, text=True, timeout=170,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count(" cases") == checks, ran.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="guards memory by Linux's mprotect")
@pytest.mark.parametrize("side", ["end", "begin"])
def test_one_number_too_many_ends_the_process(side: str) -> None:
    """So that interpreted kernels that pass read nothing beside their tensors."""
    command = [sys.executable, "-m", "tests.guarded", side]
    ran = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.returncode) == ("guarded\n", -signal.SIGSEGV), ran.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton")
def test_what_the_sanitizer_runs_can_be_made() -> None:
    """It runs on a GPU alone (tests/gpu/test_sanitizer_gpu.py), where nobody would see it rot."""
    from tests.sanitized import CASES

    assert all(case.made() for _, case, _ in CASES)
