"""Triton kernels checked without a GPU by Triton's interpreter (tests/interpreted*.py)."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[subprocess.Popen[str]]:
    """One process for all modules, because importing torch and Triton takes seconds."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.interpreter"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    ) as process:  # fmt: skip
        yield process
        process.kill()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton")
@pytest.mark.parametrize(
    ("module", "checks"),
    [
        ("interpreted", 7),
        ("interpreted_experts", 10),
        ("interpreted_decode", 13),
        ("interpreted_cascade", 7),
        ("interpreted_latent", 5),
        ("interpreted_fused", 8),
        ("interpreted_units", 4),
        ("interpreted_quantised", 9),
        ("interpreted_ranks", 3),
        ("interpreted_transducer", 2),
    ],
)
def test_interpreted_kernels_match_their_references(
    interpreter: subprocess.Popen[str], module: str, checks: int
) -> None:
    assert interpreter.stdin is not None and interpreter.stdout is not None
    interpreter.stdin.write(f"tests.{module}\n")
    interpreter.stdin.flush()
    code, output = json.loads(interpreter.stdout.readline())
    assert code == 0, output
    assert output.count(" cases") == checks, output


@pytest.mark.sample(1)
@pytest.mark.skipif(sys.platform != "linux", reason="guards memory by Linux's mprotect")
@pytest.mark.parametrize("side", ["end", "begin"])
def test_out_of_bounds_read_ends_the_process(side: str) -> None:
    """So interpreted kernels that pass read nothing beyond their tensors."""
    command = [sys.executable, "-m", "tests.guarded", side]
    ran = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ran.stdout, ran.returncode) == ("guarded\n", -signal.SIGSEGV), ran.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton")
def test_sanitizer_cases_can_be_built() -> None:
    """The sanitizer itself needs a GPU (tests/gpu/test_sanitizer_gpu.py); this checks its cases on any machine."""
    from tests.sanitized import CASES

    assert all(case.made() for _, case, _ in CASES)
