"""``colonnade verify --device cuda``: layouts over GPUs under NCCL, in float64, against one process on a GPU."""

import json
from pathlib import Path

import pytest
import torch

from colonnade import verify as it
from colonnade.cli import main
from colonnade.config import Plan

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

# The loss compiles its two passes on a GPU, and the compiler warns of its own doings.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


def _verify(model: str, world: int, out: Path) -> dict:
    """What is found; a miss ends the command with 1, and so the test."""
    main(["verify", model, "--world", str(world), "--device", "cuda", "--out", str(out)])
    return json.loads(out.read_text())


def _right(found: dict) -> None:
    assert {row["name"]: row["errors"] for row in found["plans"] if not row["ok"]} == {}
    assert found["device"] == torch.cuda.get_device_name()


def test_one_gpu(tmp_path: Path) -> None:
    """What one process computes twice is the same on a GPU as well; saved, loaded, greedy tokens."""
    found = _verify("tour", 1, tmp_path / "verify.json")
    _right(found)
    assert found["plans"][0]["errors"]["loss"] <= 1e-12


@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and this machine has {GPUS}")
@pytest.mark.parametrize("model", ["tour", "bert-tour"])
def test_plans_of_two_gpus(model: str, tmp_path: Path) -> None:
    found = _verify(model, 2, tmp_path / "verify.json")
    _right(found)
    assert len(found["plans"]) >= 8


@pytest.mark.skipif(GPUS < 4, reason=f"needs 4 GPUs, and this machine has {GPUS}")
def test_mixed_plans_of_four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two axes at a time; the whole covering set is the command's."""
    few = [
        Plan(dp=2, tp=2, sequence_parallel=True), Plan(cp=2, tp=2), Plan(pp=2, dp=2), Plan(replicate=2, dp=2),
        Plan(cp=4), Plan(pp=4, schedule="zero_bubble", stages=2),
    ]  # fmt: skip
    monkeypatch.setattr(it, "covering", lambda plans: [plan for plan in plans if plan in few])
    found = _verify("tour", 4, tmp_path / "verify.json")
    _right(found)
    assert len(found["plans"]) >= 5
