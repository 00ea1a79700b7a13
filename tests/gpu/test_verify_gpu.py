"""``colonnade verify --device cuda``: layouts under NCCL in float64 equal one process on a GPU."""

import json
from pathlib import Path

import pytest
import torch

from colonnade import verify
from colonnade.cli import main
from colonnade.config import Plan

GPUS = torch.cuda.device_count()

# torch.compile, which the loss uses on a GPU, emits warnings of its own.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


def _verify(model: str, world: int, out: Path) -> dict:
    """Run the command and read its report; a failed check exits with 1, which fails the test."""
    main(["verify", model, "--world", str(world), "--device", "cuda", "--out", str(out)])
    return json.loads(out.read_text())


def _check(report: dict) -> None:
    assert {row["name"]: row["errors"] for row in report["plans"] if not row["ok"]} == {}
    assert report["device"] == torch.cuda.get_device_name()


def test_one_gpu(tmp_path: Path) -> None:
    """One process: repeated runs, save and load, and greedy tokens agree on a GPU."""
    report = _verify("tour", 1, tmp_path / "verify.json")
    _check(report)
    assert report["plans"][0]["errors"]["loss"] <= 1e-12


@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and this machine has {GPUS}")
@pytest.mark.parametrize("model", ["tour", "bert-tour"])
def test_plans_of_two_gpus(model: str, tmp_path: Path) -> None:
    report = _verify(model, 2, tmp_path / "verify.json")
    _check(report)
    assert len(report["plans"]) >= 8


@pytest.mark.skipif(GPUS < 4, reason=f"needs 4 GPUs, and this machine has {GPUS}")
def test_mixed_plans_of_four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of axes only; the command itself runs the whole covering set."""
    selected = [
        Plan(dp=2, tp=2, sequence_parallel=True), Plan(cp=2, tp=2), Plan(pp=2, dp=2), Plan(replicate=2, dp=2),
        Plan(cp=4), Plan(pp=4, schedule="zero_bubble", stages=2),
    ]  # fmt: skip
    monkeypatch.setattr(verify, "covering", lambda plans: [plan for plan in plans if plan in selected])
    report = _verify("tour", 4, tmp_path / "verify.json")
    _check(report)
    assert len(report["plans"]) >= 5
