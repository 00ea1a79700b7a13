"""The speed benchmarks of layouts, in small on a CPU: they run to the end, and conclude what they should."""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch

import _jobs
import bubble
import context
import cost_growth
import engine
import expert_parallel
import fsdp
import moe_layer
import moe_study
import weak_scaling
from tests.corpora import small
from tests.worlds import run

pytestmark = pytest.mark.xdist_group("worlds")


def rows_of(jobs: list[_jobs.Job]) -> list[_jobs.Row]:
    """As ``series``, in worlds that stand already; rank 0's rows."""
    found = []
    for world in sorted({job.plan.world for job in jobs}):
        found += run(world, _jobs.work, [job for job in jobs if job.plan.world == world], "cpu")[0]
    return found


def test_fsdp() -> None:
    rows, heads = fsdp.scaled(rows_of(fsdp.scaling_jobs(True, [1, 2])))
    assert [row["ranks"] for row in rows] == [1, 2] and rows[0]["share_of_linear"] == 1
    assert rows[1]["share_of_linear"] == pytest.approx(rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"] / 2, abs=1e-3)
    assert len(heads) == 1
    rows = rows_of(fsdp.llama_jobs(True, 2))
    assert len(fsdp.llama_heads(rows)) == 2
    assert rows[0]["first_loss"] == rows[1]["first_loss"]


def test_context() -> None:
    one, two = rows = _jobs.share_of_linear(rows_of(context.jobs(True, [1, 2], 0)))
    assert one["first_loss"] == two["first_loss"], "the same tokens, the same weights"
    assert (one["plan"], two["plan"]) == ("one process", "cp=2")
    assert context.heads_of(rows)[0].peer_value == one["tokens_per_s"]


def test_bubble() -> None:
    size = bubble.sizes(tiny=True)
    rows, heads = bubble.judged([row for n in (1, 2) for row in run(n, bubble.work, n, size, "cpu")[0]])
    assert {row["schedule"] for row in rows} == {"one rank", "gpipe", "1f1b", "interleaved", "zero_bubble"}
    assert len(rows) == 2 * 5 and len(heads) == 4


def test_a_pipeline_that_is_as_theory_says_has_that_bubble() -> None:
    rows = [{"schedule": "one rank", "ranks": 1, "micro_batches": m, "step_ms": 12.0 * m, "waits": 0.0} for m in (2, 4)]
    for plan in bubble.plans(4):
        b = bubble.waits(plan)
        rows += [
            {"schedule": plan.schedule, "ranks": 4, "micro_batches": m, "step_ms": 3 * (m + b), "waits": b}
            for m in (8, 16)
        ]
    found, _ = bubble.judged(rows)
    for row in found:
        assert row["over_theory"] == pytest.approx(0, abs=1e-4)
        assert row["bubble"] == pytest.approx(row["bubble_theory"], abs=1e-4)
        assert row["bubble_by_slope"] == pytest.approx(row["bubble_theory"], abs=1e-4)
    at_8 = {row["schedule"]: row["bubble_theory"] for row in found if row["micro_batches"] == 8}
    assert at_8 == {"gpipe": 0.375, "1f1b": 0.375, "interleaved": 0.1875, "zero_bubble": 0.0625}


def test_cost_growth(tmp_path: Path) -> None:
    jobs = cost_growth.jobs(True, [1, 2])
    rows = cost_growth.foretold(jobs, rows_of(jobs))
    base, deeper = rows[0], next(row for row in rows if row["layers"] == 4)
    assert base["of_foretold"] == 1 and deeper["foretold_tokens_per_s"] < base["foretold_tokens_per_s"]
    assert rows[-1]["foretold_tokens_per_s"] == 2 * base["foretold_tokens_per_s"]
    cost_growth.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_weak_scaling_and_its_peers() -> None:
    """torch's layouts compute the same loss with and without sequence parallelism, on one rank and on two."""
    rows = rows_of(weak_scaling.jobs(True, [1, 2], weak_scaling.WHO))
    torchs = [row for row in rows if str(row["what"]).startswith("torch")]
    assert [row["what"] for row in torchs] == ["torch", "torch", "torch_sp"]
    assert len({row["first_loss"] for row in torchs}) == 1
    for row in rows:
        parts = ("compute", "communication_exposed", "idle")
        assert sum(row[f"traced_{part}_ms"] for part in parts) == pytest.approx(row["traced_step_ms"], rel=0.02)
        assert (row["traced_communication_exposed_ms"] > 0) is (row["ranks"] > 1)
    assert len(weak_scaling.heads_of(rows)) == 2


def test_a_machine_without_gpus_skips(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`make bench` runs what the machine can."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    moe_study.main([])
    assert "skipped: needs a GPU" in capsys.readouterr().out
    for script in (fsdp, context, bubble, cost_growth, weak_scaling, expert_parallel):
        script.main([])
        assert "needs 4 GPUs, and this machine has 0" in capsys.readouterr().out


def test_a_record_is_written(tmp_path: Path) -> None:
    context.main(["--tiny", "--worlds", "1", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "context_tiny.json").read_text())["rows"]
    assert row["ranks"] == 1 and row["share_of_linear"] == 1


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # the peer's
def test_the_engine_says_what_transformers_says() -> None:
    rows, heads = engine.measure(True, 6, 1)
    assert {row["who"] for row in rows} == {"colonnade", "transformers"}
    assert rows[0]["agree"] == 1 and 0 <= rows[0]["idle"] <= 1
    assert heads[0].peer == "transformers"


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
            assert row["hidden"] == pytest.approx(1 - (row["ms"] - row["compute_ms"]) / row["exchange_ms"], abs=2e-2)
    assert len(expert_parallel.of(rows, who="all_to_all_single + grouped_mm")) == 2
    picked = expert_parallel.of(rows, who="auto")
    assert [row["over_best"] >= -1e-3 for row in picked] == [True, True]
    assert len(expert_parallel.of(rows, who="taking turns")) == 2
    kept = (tmp_path / "it_2.partial.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == rows, "a run that ends early keeps what it measured"
    assert len(expert_parallel.headlines([row | {"load": "uniform"} for row in rows])) == 6
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
