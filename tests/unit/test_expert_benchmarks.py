"""The benchmarks of experts, in small on a CPU: they run to the end, conclude what they should, keep what they had."""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch

import expert_parallel
import moe_layer
import moe_study
import tune_experts
from tests.corpora import small
from tests.worlds import run

pytestmark = pytest.mark.xdist_group("worlds")


def test_a_machine_without_gpus_skips(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["it"])
    for script in (expert_parallel, moe_layer, moe_study, tune_experts):
        script.main()
        assert "skipped: needs" in capsys.readouterr().out


def test_expert_parallel(tmp_path: Path) -> None:
    """Every way of both layouts, the peer, auto and the turns; and what is hidden is what the formula says."""
    task = expert_parallel.Task(("qwen3",), ("zipf",), (1, 4), True, 24, True, 1, tmp_path, "it", 600.0)
    rows = run(2, expert_parallel.work, 2, task, "cpu")[0]
    ours = expert_parallel.of(rows, who="colonnade")
    ways = [(row["plan"], row["pass"], row["r"], row["p"]) for row in ours]
    whole = [(r, p) for r, p in ((0, 1), (1, 1), (1, 4))]
    cut = [*whole, (2, 1), (2, 4)]
    wanted = [("ep=2 sh=1", what, *way) for what in expert_parallel.PASSES for way in whole]
    assert ways == wanted + [("ep=1 sh=2", what, *way) for what in expert_parallel.PASSES for way in cut]
    for row in ours:
        if row["r"]:
            assert row["hidden"] == pytest.approx(
                1 - (row["ms"] - row["compute_ms"]) / row["exchange_ms"], rel=2e-2, abs=2e-2
            )
    assert len(expert_parallel.of(rows, who="all_to_all_single + grouped_mm")) == 2
    picked = expert_parallel.of(rows, who="auto")
    assert [row["over_best"] >= -1e-3 for row in picked] == [True, True]
    assert len(expert_parallel.of(rows, who="taking turns")) == 2
    kept = (tmp_path / "it_2.partial.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == rows, "a run that ends early keeps what it measured"
    assert len(expert_parallel.headlines([row | {"load": "uniform"} for row in rows])) == 6
    printed = list(expert_parallel.table(rows))
    assert len(printed) == 4 + 2 * 2 + 2 * 3 + 2 + 4, "a title, a line for each degree, the peer, auto and the turns"
    expert_parallel.draw(rows, tmp_path / "picture.png")
    assert run(2, expert_parallel.work, 2, task._replace(seconds=0.0, name="late"), "cpu") == [[], []]
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_moe_study(tmp_path: Path) -> None:
    corpus = small(tmp_path / "corpus")
    out = tmp_path / "out"
    moe_study.main(["--toy", "--corpus", str(corpus), "--steps", "6", "--seeds", "0", "1", "--out", str(out)])
    record = json.loads((out / "moe_study_toy.json").read_text())
    runs = [(row["model"], row["balance"], row["seed"]) for row in record["rows"]]
    main = [
        (model, balance, seed) for seed in (0, 1) for model, balance in (("dense", "dense"), ("experts", "switch loss"))
    ]
    assert runs == main + [("experts", name, 0) for name in moe_study.METHODS if name != "switch loss"]
    dense, experts, *_ = record["rows"]
    assert dense["mflop_per_token"] == experts["mflop_per_token"] and dense["parameters"] < experts["parameters"]
    assert all(row["experts"] == 2 * 4 and 0 <= row["entropy"] <= 1 for row in record["rows"][4:])
    assert record["rows"][-1]["busiest_over_mean"] < 1.1, "experts that choose have even loads"
    assert "held-out loss of the experts minus the dense model's" in record["notes"]
    assert not list(out.glob("*.partial.jsonl")) and (out / "moe_study_toy.png").stat().st_size > 10_000


def test_who_wins_and_who_is_dead() -> None:
    def row(model: str, balance: str, seed: int, loss: float) -> dict:
        return {"model": model, "balance": balance, "seed": seed, "validation_loss": loss}

    dense = [row("dense", "dense", seed, 3.0) for seed in (0, 1)]
    won = dense + [row("experts", "switch loss", seed, 2.9) for seed in (0, 1)] + [row("experts", "none", 0, 9.0)]
    assert moe_study.judge(won).endswith("-0.1000 ± 0.0000 nats (-0.1000, -0.1000): the experts win in every seed")
    split = dense + [row("experts", "switch loss", seed, 2.9 + 0.2 * seed) for seed in (0, 1)]
    assert moe_study.judge(split).endswith("neither wins in every seed")
    loads = [{"step": i, "1": {"load": [0 if i > 5 else 50, 10, 10, 10]}} for i in range(20)]
    assert moe_study.dead(moe_study.Run("none", 0, [], loads)) == (1, 4)


def test_a_peer_that_fails_has_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And the rest goes on; so does one that computes something else. After its time the run begins no further row."""

    def broken(*_: object) -> moe_layer.Run:
        def run(x_TD: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no kernel for this\nand a long story")

        return run

    monkeypatch.setattr(moe_layer, "pipeline", broken)
    monkeypatch.setattr(moe_layer, "transformers", lambda *_: lambda x_TD, *_: x_TD + 1)
    args = argparse.Namespace(
        device="cpu", tokens=[8], loads=["uniform"], passes=["forward"], who=None, until=math.inf, minutes=8.0
    )
    rows, clock = moe_layer.Rows("it", tmp_path), moe_layer.Clock("cpu")
    moe_layer.measure(clock, "qwen3", moe_layer.TINY["qwen3"], args, 1e9, 1e9, rows)
    by_who = {row["who"]: row for row in rows}
    assert by_who["grouped_mm pipeline"]["failed"] == "RuntimeError: no kernel for this"
    assert str(by_who["transformers eager"]["failed"]).startswith("computes something else")
    assert float(by_who["colonnade"]["ms"] or 0) > 0 and "failed" not in by_who["colonnade, grouped_mm"]
    args.until = 0.0
    moe_layer.measure(clock, "qwen3", moe_layer.TINY["qwen3"], args, 1e9, 1e9, rows)
    assert len(rows) == len((tmp_path / "it.partial.jsonl").read_text().splitlines()) == 5
