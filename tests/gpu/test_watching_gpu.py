"""On a GPU: profiles are built from kernel events, and out-of-memory errors are broken down."""

import gc
import gzip
import json
import os
import re
from pathlib import Path

import pytest
import torch

from colonnade.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from colonnade.data import build
from colonnade.errors import CapacityError
from colonnade.train import Trainer
from colonnade.train.out_of_memory import UNITS
from colonnade.train.trackers import read_rows

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# torch.compile, which the loss uses on a GPU, emits warnings of its own.
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ["column", "row", "share", "whole", "bears", "stands", "weight", "of", "the", "and"]
MODEL = ModelConfig(vocab_size=300, layers=4, width=512, heads=8, kv_heads=8, ffn_width=2048, context=512, tied=True)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    texts = [(str(i), " ".join(WORDS[(i * j + j) % 10] for j in range(8 + 7 * i % 900))) for i in range(400)]
    build(texts, tmp_path / "corpus", vocab_size=300, validation_share=0.2)
    t = TrainConfig(
        steps=8,
        batch=32,
        micro_batch=32,
        warmup=2,
        dtype="bfloat16",
        compile=False,
        fused_adamw=False,
        eval_every=0,
        profile=3,
    )
    data = DataConfig(path=tmp_path / "corpus", sequence=512)
    return RunConfig(name="it", runs=tmp_path, device="cuda", model=MODEL, data=data, train=t)


def test_profile_is_built_from_kernel_events(config: RunConfig) -> None:
    Trainer(config).fit()
    (row,) = [row for row in read_rows(config.folder) if "compute_s" in row]
    assert row["step"] == 6
    for kind in ("matmul", "attention", "optimizer", "elementwise", "compute"):
        assert row[f"{kind}_s"] > 0, kind
    assert row["matmul_s"] > row["optimizer_s"]
    assert row["communication_exposed_s"] == 0
    parts = ("compute", "communication_exposed", "data_exposed", "idle")
    assert sum(row[f"{kind}_s"] for kind in parts) == pytest.approx(row["step_s"])
    with gzip.open(config.folder / "profile" / "rank-0.json.gz", "rt") as file:
        assert any(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])
    peaks = [row["memory_peak_bytes"] for row in read_rows(config.folder) if "loss" in row]
    n = config.model.parameters
    assert min(peaks) > (4 + 8 + 2) * n and max(peaks) < 40e9


def test_out_of_memory_error_gives_a_breakdown(config: RunConfig) -> None:
    """The memory limit fits the weights, their moments and a little more."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()  # what other tests have left
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((0.9 * GIB + before) / total)
    try:
        with pytest.raises(CapacityError) as caught:
            Trainer(config).fit()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    message = str(caught.value)
    assert message.startswith("out of memory on cuda:0 in step 1, which requested")
    n = config.model.parameters
    assert row_bytes(message, "master weights") == pytest.approx(4 * n, rel=0.01)
    assert row_bytes(message, "weights to compute with") == pytest.approx(2 * n, rel=0.01)
    assert row_bytes(message, "moments") == pytest.approx(8 * n, rel=0.01)
    known = sum(row_bytes(message, name) for name in ("master weights", "weights to compute with", "moments"))
    assert 0 < row_bytes(message, "activations and the rest") - before < 0.95 * GIB - known
    assert "--train.micro_batch 16" in message or "--train.recompute full" in message


GIB = 1 << 30


def row_bytes(message: str, name: str) -> float:
    found = re.search(rf"^  {name} +([\d.]+) (\w+)", message, re.MULTILINE)
    assert found, message
    return float(found[1]) * UNITS[found[2].lower()]
