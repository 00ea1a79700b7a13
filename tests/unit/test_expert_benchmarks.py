"""Expert benchmarks at toy sizes on a CPU: they run, draw the right conclusions and keep partial results."""

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
from colonnade.kernels.experts import tiles
from moe import layer_profile, layer_share, tuning_table
from tests.corpora import small
from tests.worlds import run


def test_benchmarks_skip_without_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["it"])
    for script in (expert_parallel, moe_layer, moe_study, tune_experts):
        script.main()
        assert "skipped: needs" in capsys.readouterr().out


@pytest.mark.slow
def test_expert_parallel_benchmark(tmp_path: Path) -> None:
    """Covers every option of both layouts, the peer, auto and turns; hidden time follows the formula."""
    task = expert_parallel.Task(("qwen3",), ("zipf",), (1, 4), True, 24, True, True, 1, tmp_path, "it", 600.0)
    rows = run(2, expert_parallel.work, 2, task, "cpu")[0]
    ours = expert_parallel.of(rows, who="colonnade")
    options = [(row["plan"], row["pass"], row["r"], row["p"]) for row in ours]
    whole = [(r, p) for r, p in ((0, 1), (1, 1), (1, 4))]
    cut = [*whole, (2, 1), (2, 4)]
    expected = [("ep=2 etp=1", what, *option) for what in expert_parallel.PASSES for option in whole]
    assert options == expected + [("ep=1 etp=2", what, *option) for what in expert_parallel.PASSES for option in cut]
    for row in ours:
        if row["r"]:
            assert row["hidden"] == pytest.approx(
                1 - (row["ms"] - row["compute_ms"]) / row["exchange_ms"], rel=2e-2, abs=2e-2
            )
        assert ("cut_ms" in row) == (row["p"] > 1), "rows with several parts report the cost of splitting"
    assert len(expert_parallel.of(rows, who="all_to_all_single + grouped_mm")) == 2
    picked = expert_parallel.of(rows, who="auto")
    assert [row["over_best"] >= -1e-3 for row in picked] == [True, True]
    assert len(expert_parallel.of(rows, who="taking turns")) == 2
    partial = (tmp_path / "it_2.partial.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in partial] == rows, "a run that ends early keeps its rows"
    assert len(expert_parallel.headlines([row | {"load": "uniform"} for row in rows])) == 6
    printed = list(expert_parallel.table(rows))
    assert len(printed) == 4 + 2 * 2 + 2 * 3 + 2 + 4, "a title, a line for each degree, the peer, auto and the turns"
    expert_parallel.draw(rows, tmp_path / "picture.png")
    assert run(2, expert_parallel.work, 2, task._replace(seconds=0.0, name="late"), "cpu") == [[], []]
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
def test_moe_study_benchmark(tmp_path: Path) -> None:
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
    assert record["rows"][-1]["busiest_over_mean"] < 1.1, "expert-choice routing has even loads"
    assert "held-out loss of the experts minus the dense model's" in record["notes"]
    assert not list(out.glob("*.partial.jsonl")) and (out / "moe_study_toy.png").stat().st_size > 10_000


def test_verdict_and_count_of_dead_experts() -> None:
    def row(model: str, balance: str, seed: int, loss: float) -> dict:
        return {"model": model, "balance": balance, "seed": seed, "validation_loss": loss}

    dense = [row("dense", "dense", seed, 3.0) for seed in (0, 1)]
    won = dense + [row("experts", "switch loss", seed, 2.9) for seed in (0, 1)] + [row("experts", "none", 0, 9.0)]
    assert moe_study.summarise_methods(won).endswith(
        "-0.1000 ± 0.0000 nats (-0.1000, -0.1000): the experts win in every seed"
    )
    split = dense + [row("experts", "switch loss", seed, 2.9 + 0.2 * seed) for seed in (0, 1)]
    assert moe_study.summarise_methods(split).endswith("neither wins in every seed")
    loads = [{"step": i, "1": {"load": [0 if i > 5 else 50, 10, 10, 10]}} for i in range(20)]
    assert moe_study.dead_experts(moe_study.Run("none", 0, [], loads)) == (1, 4)


def test_a_failing_peer_gets_a_row_with_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A failing or wrong peer gets a row with its error; after its deadline the run starts no further row."""

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


class FakeCompilation:
    """The result of compiling a candidate: None, or the reason of its failure."""

    def __init__(self, why: str | None) -> None:
        self.why = why

    def ready(self) -> bool:
        return True

    def get(self) -> str | None:
        return self.why


class FakeLayerAndClock:
    """A layer and a clock in one. Of our tiles, BN=256 is the fastest; torch's product wins only in the backward pass;
    tiles of BM=256 give wrong results.
    """

    back = True

    def run(self, kernel: str) -> list[torch.Tensor]:
        self.kernel, self.how = kernel, tiles.OVERRIDES[kernel]
        return [torch.full((4,), 2.0 if self.how.BM == 256 else 1.0)]

    def median(self, run, budget_s: float) -> float:
        run()
        if self.how.library:
            return 1.0 if "grad" in self.kernel else 9.0
        return {256: 2.0, 128: 3.0}.get(self.how.BN, 4.0)


def test_each_product_uses_the_fastest_candidate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shape, active = tiles.LayerShape(8, 512, 256), 2
    monkeypatch.setattr(tiles, "OVERRIDES", {})
    fake = FakeLayerAndClock()
    jobs = []

    def submit(kernel: str, how: tiles.GroupedTiles, _: object) -> FakeCompilation:
        jobs.append((kernel, how))
        return FakeCompilation("does not fit" if how.BN == 256 and kernel == "down" else None)

    tuner = tune_experts.Tuner(shape, active, fake, submit, math.inf, layer=lambda _: fake)  # type: ignore[arg-type]
    tuner.run(lambda: None)
    record = json.loads(tune_experts.TABLE.read_text())
    measured = {"measured_on": "a GPU", "shapes": [tuner.record()]}
    text = tuning_table.table_json(tuning_table.merge_tables(record, [measured]))
    table = json.loads(text)
    assert table["kernels"].keys() == record["kernels"].keys() and table["measured_on"].endswith("a GPU")
    again = {**tuner.record(), "kernels": {}}
    twice = tuning_table.merge_tables(table, [{"measured_on": "none", "shapes": [again]}])
    assert [s for s in twice["shapes"] if s["E"] == 8 and s["D"] == 256] == [again], (
        "a shape's new rows replace its old"
    )
    (written_shape,) = [s for s in table["shapes"] if (s["E"], s["F"], s["D"]) == shape]
    rows = tiles.parse_rows(written_shape["kernels"])
    assert {kernel: [how.library for _, how in entries] for kernel, entries in rows.items()} == {
        kernel: [False] * 6 if kernel in ("gated_up", "down") else [True] * 2 for kernel in rows
    }
    assert [how.BM == 256 for entries in rows.values() for _, how in entries].count(True) == 0, (
        "BM=256 gives wrong results"
    )
    assert rows["down"][-1][1].BN == 128 and rows["hidden_dgrad"][-1][1].BN == 256, (
        "tiles that do not compile are skipped"
    )
    means = [T * active / shape.E for T in tune_experts.TOKENS]
    for mean, row in zip(means, rows["down"], strict=True):
        assert next(it for it in rows["down"] if it[0] is None or mean <= it[0]) is row, (
            "each number of tokens has its own row"
        )
    late = tune_experts.Tuner(shape, active, fake, submit, -math.inf, layer=lambda _: fake)  # type: ignore[arg-type]
    late.run(lambda: None)
    assert late.record()["kernels"]["down"][-1]["tiles"] == tiles.select_tiles("down", 2**20, shape, 2)._asdict()


def test_tiles_of_the_nearest_measured_layer_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, other = (tiles.GroupedTiles(16, 16, 16, 4, stages) for stages in (1, 2, 3))
    measured = {
        tiles.LayerShape(8, 14336, 4096): {"down": [(None, one)]},
        tiles.LayerShape(128, 768, 2048): {"down": [(None, two)]},
    }
    monkeypatch.setattr(tiles, "table", lambda: ({"down": [], "up": [(4, one), (None, other)]}, measured))
    table_rows = tiles.table_rows.__wrapped__
    assert table_rows("down", tiles.LayerShape(64, 8192, 4096)) == [(None, one)]
    assert table_rows("down", tiles.LayerShape(8, 1408, 2048)) == [(None, two)]
    assert table_rows("up", tiles.LayerShape(8, 1408, 2048))[-1] == (None, other), (
        "without measurements the default rows are used"
    )


def test_profile_reports_the_time_of_each_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [
        "up_kernel",
        "down_kernel",
        "hidden_dgrad_kernel",
        "down_kernel",
        "wgrad_kernel",
        "wgrad_kernel",
        "void cutlass_GEMM<x>",
        "copy",
    ]
    kernels = [(name, 10.0 * i, 8.0) for i, name in enumerate(names)]
    lines = layer_profile.lines(kernels, 4e9, 1e15)
    rates = [float(line.split()[-5]) if "TFLOP/s" in line else None for line in lines[:-1]]
    assert rates == [1000.0, 500.0, 500.0, 1000.0, 1000.0, 500.0, 500.0, None], "kernels of one product or of two"
    assert lines[-1].split() == ["78.0", "us", "in", "all,", "8", "kernels,", "14.0", "us", "between", "them"]
    ready = [("few_up", 2.0, 20.0), ("few_down", 3.0, 30.0), ("copy", 40.0, 5.0), ("early", 41.0, 1.0)]
    taken = [("few_up", 2.0, 20.0), ("few_down", 22.0, 11.0), ("copy", 40.0, 5.0), ("early", 45.0, 0.0)]
    assert layer_profile.without_overlap(ready[::-1]) == taken
    monkeypatch.setattr("sys.argv", ["it", "--tiny", "--profile", "--shapes", "qwen3", "--loads", "zipf"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    moe_layer.main()
    printed = capsys.readouterr().out
    assert "qwen3, 1 tokens, zipf, forward+backward:" in printed and printed.count(" us in all") == 2


@pytest.mark.slow
def test_the_time_of_a_layer_is_divided_into_groups(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels are grouped by purpose; a product that also runs in the router alone counts as the router's."""
    names = {
        "router": ["nvjet_small", "_top_experts", "_histogram", "aminmax", "Memset"],
        "dispatch": [
            "_count",
            "DeviceScanKernel",
            "_scatter",
            "_sort_by_counting",
            "_inverse_permutation",
            "_gather_by_token",
        ],
        "products": [
            "up_kernel",
            "down_kernel",
            "activation_forward_kernel",
            "cutlass GroupProblemShape",
            "wgrad_kernel",
        ],
        "combine": ["_combine_kernel"],
    }
    alone = {"nvjet_small", "_top_experts"}
    for group, kernels in names.items():
        assert {layer_share.group_of(name, alone) for name in kernels} == {group}
    kernels = [
        (name, float(i), 10.0)
        for i, name in enumerate(
            [*names["router"], "_scatter", "_combine_kernel", "up_kernel", "up_kernel", "up_kernel"]
        )
    ]
    runs = iter([[(name, 0.0, 1.0) for name in alone], *[kernels] * layer_share.RUNS])
    monkeypatch.setattr(layer_share, "timeline", lambda *_, **__: next(runs))
    weights, _ = moe_layer.stacks(moe_layer.TINY["qwen3"], "cpu", torch.bfloat16)
    layer = layer_share.layer_of(4, weights)
    assert layer.experts.up.data_ptr() == weights.up_EFD.data_ptr(), "no copies"
    shares = layer_share.measure_shares(layer, torch.zeros(3, 64).bfloat16(), back=False, gpu=True)
    assert shares[:4] == (50.0, 10.0, 10.0, 30.0) and shares.share == pytest.approx(0.7)
    monkeypatch.undo()
    monkeypatch.setattr("sys.argv", ["it", "--tiny", "--shares", "--shapes", "qwen3"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    moe_layer.main()
    printed = capsys.readouterr().out
    assert "qwen3, 40 tokens, forward+backward:" in printed and printed.count("router, dispatch and combine") == 4
