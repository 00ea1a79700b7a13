"""Common test setup: one thread per process, no network, fixed examples, GPU tests skipped without a GPU."""

import os
from pathlib import Path

# Set before torch is imported, here and in child processes: workers share the cores, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import pytest
import torch

# No deadline, because shared machines are slow; the same examples on every run, so that failures reproduce.
# pytest --hypothesis-profile=explore searches for new examples.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("ci")


TESTS = Path(__file__).parent
SLOWEST = (
    "unit/test_triton.py", "faults/test_processes.py", "serve/test_serve_life.py", "parity/test_dropout_parity.py",
    "parity/test_verify.py", "unit/test_docs.py", "parity/test_train_loop.py", "unit/test_triton_compiles.py",
    "parity/test_precision_runs.py", "parity/test_train_step.py", "unit/test_launch.py", "parity/test_moe_train.py",
    "parity/test_bert_train.py", "parity/test_upcycle.py", "parity/test_experts.py", "parity/test_monitoring.py",
    "parity/test_hosts.py", "parity/test_verify_moe.py", "parity/test_train_checkpoint.py", "unit/test_dropout.py",
    "unit/test_benchmarks.py", "parity/test_smollm2.py", "unit/test_float8.py", "unit/test_hf_hub.py",
)  # fmt: skip
"""Files that take more than about ten seconds, longest first.

With --dist loadfile each worker takes one file at a time; a long file started last would leave the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {TESTS / name: i for i, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
