"""compute-sanitizer reports no errors in the paged-attention kernels.

pytest -q -m long tests/gpu/test_sanitizer_gpu.py        # a few minutes, most of it compiling
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

ROOT = Path(__file__).parents[2]
PROGRAM = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(PROGRAM is None, reason="compute-sanitizer is not installed; it comes with CUDA's toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_are_clean(tool: str) -> None:
    assert PROGRAM is not None
    path = os.pathsep.join([str(ROOT), *sys.path])
    # cuda-bindings queries driver functions that may not exist, which is harmless.
    more = ["--report-api-errors", "no"] if tool == "memcheck" else []
    ran = subprocess.run(
        [PROGRAM, "--tool", tool, *more, "--error-exitcode", "9", sys.executable, "-m", "tests.sanitizer_runs"],
        check=False, cwd=ROOT, capture_output=True, text=True, timeout=590,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path},
    )  # fmt: skip
    if "Device not supported" in ran.stdout:
        pytest.skip("compute-sanitizer does not work on this machine: Device not supported")
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "\nall\n" in ran.stdout
