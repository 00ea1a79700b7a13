"""Speed benchmarks at toy sizes on a CPU: they run to the end and draw the right conclusions."""

import importlib.machinery
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import attention
import bubble
import compress as compress_benchmark
import context
import cost_growth
import decode_cpu_bandwidth
import decode_model
import engine
import expert_compression
import flash_decoding
import fsdp
import gptq_columns
import int8_step
import moe_cpu
import moe_layer
import moe_to_dense
import prefill
import quantised_linear
import quantised_quality
import skinny_gemm
import speech
import speech_delay
import speech_streams
import ternary_rows
import weak_scaling
from colonnade import api
from colonnade.config import Plan
from colonnade.kernels.attention import decode_tiles
from colonnade.parallel.distributed_context import DistributedContext
from decoding import decode_cells, tune
from harness import training_jobs
from harness.report import RESULTS, ROOT
from tests.models import build
from tests.worlds import run


def rows_of(jobs: list[training_jobs.Job]) -> list[training_jobs.Row]:
    """Runs jobs as ``series`` does, on worker processes that are already up; returns rank 0's rows."""
    results = []
    for world in sorted({job.plan.world for job in jobs}):
        results += run(world, training_jobs.run_on_rank, [job for job in jobs if job.plan.world == world], "cpu")[0]
    return results


@pytest.mark.slow
def test_fsdp_benchmark() -> None:
    rows, heads = fsdp.scaled(rows_of(fsdp.scaling_jobs(True, [1, 2])))
    assert [row["ranks"] for row in rows] == [1, 2] and rows[0]["share_of_linear"] == 1
    assert rows[1]["share_of_linear"] == pytest.approx(rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"] / 2, abs=1e-3)
    assert len(heads) == 1
    rows = rows_of(fsdp.llama_jobs(True, 2))
    assert len(fsdp.llama_heads(rows)) == 2
    assert rows[0]["first_loss"] == rows[1]["first_loss"]


@pytest.mark.slow
def test_context_parallel_benchmark() -> None:
    one, two = rows = training_jobs.share_of_linear(rows_of(context.jobs(True, [1, 2], 0)))
    assert one["first_loss"] == two["first_loss"], "the same tokens, the same weights"
    assert (one["plan"], two["plan"]) == ("one process", "cp=2")
    assert context.heads_of(rows)[0].peer_value == one["tokens_per_s"]


def test_attention_benchmark() -> None:
    (row,) = attention.measured("tiny", attention.TINY["tiny"], "cpu")
    assert row["way"] == "chosen" and row["forward_ms"] > 0 and row["backward_ms"] > 0


@pytest.mark.slow
def test_pipeline_bubble_benchmark() -> None:
    size = bubble.sizes(tiny=True)
    rows, heads = bubble.with_bubbles([row for n in (1, 2) for row in run(n, bubble.work, n, size, "cpu")[0]])
    assert {row["schedule"] for row in rows} == {"one rank", "gpipe", "1f1b", "interleaved", "zero_bubble"}
    assert len(rows) == 2 * 5 and len(heads) == 4


def test_ideal_step_times_give_the_theoretical_bubble() -> None:
    rows = [{"schedule": "one rank", "ranks": 1, "micro_batches": m, "step_ms": 12.0 * m, "waits": 0.0} for m in (2, 4)]
    for plan in bubble.plans(4):
        b = bubble.waits(plan)
        rows += [
            {"schedule": plan.schedule, "ranks": 4, "micro_batches": m, "step_ms": 3 * (m + b), "waits": b}
            for m in (8, 16)
        ]
    results, _ = bubble.with_bubbles(rows)
    for row in results:
        assert row["over_theory"] == pytest.approx(0, abs=1e-4)
        assert row["bubble"] == pytest.approx(row["bubble_theory"], abs=1e-4)
        assert row["bubble_by_slope"] == pytest.approx(row["bubble_theory"], abs=1e-4)
    at_8 = {row["schedule"]: row["bubble_theory"] for row in results if row["micro_batches"] == 8}
    assert at_8 == {"gpipe": 0.375, "1f1b": 0.375, "interleaved": 0.1875, "zero_bubble": 0.0625}


@pytest.mark.slow
def test_cost_growth_benchmark(tmp_path: Path) -> None:
    jobs = cost_growth.jobs(True, [1, 2])
    rows = cost_growth.with_predictions(jobs, rows_of(jobs))
    base, deeper = rows[0], next(row for row in rows if row["layers"] == 4)
    assert base["of_foretold"] == 1 and deeper["foretold_tokens_per_s"] < base["foretold_tokens_per_s"]
    assert rows[-1]["foretold_tokens_per_s"] == 2 * base["foretold_tokens_per_s"]
    cost_growth.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.slow
def test_weak_scaling_benchmark_and_peers() -> None:
    """torch's layouts compute the same loss with and without sequence parallelism, on one rank and on two."""
    rows = rows_of(weak_scaling.jobs(True, [1, 2], weak_scaling.CONFIGURATIONS))
    torch_rows = [row for row in rows if str(row["what"]).startswith("torch")]
    assert [row["what"] for row in torch_rows] == ["torch", "torch", "torch_sp"]
    assert len({row["first_loss"] for row in torch_rows}) == 1
    for row in rows:
        parts = ("compute", "communication_exposed", "idle")
        assert sum(row[f"traced_{part}_ms"] for part in parts) == pytest.approx(row["traced_step_ms"], rel=0.02)
        assert (row["traced_communication_exposed_ms"] > 0) is (row["ranks"] > 1)
    assert len(weak_scaling.heads_of(rows)) == 2


def test_benchmarks_skip_without_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`make bench` runs only what the machine supports."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for script in (fsdp, context, bubble, cost_growth, weak_scaling):
        script.main([])
        assert "needs 4 GPUs, and this machine has 0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_record_is_written_and_kept_rows_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--tiny", "--worlds", "1", "--out", str(tmp_path), "--keep", str(tmp_path / "kept")]
    context.main(argv)
    (row,) = json.loads((tmp_path / "context_tiny.json").read_text())["rows"]
    assert row["ranks"] == 1 and row["share_of_linear"] == 1
    monkeypatch.setattr("harness.training_jobs.run_on_rank", lambda *_: pytest.fail("measured again"))
    context.main(argv)
    assert json.loads((tmp_path / "context_tiny.json").read_text())["rows"] == [row]
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        training_jobs.run_jobs(context.jobs(True, [1], 0)[:1] + fsdp.llama_jobs(True, 1)[:1], "cpu", tmp_path / "kept")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # warnings of the peer library
def test_engine_output_agrees_with_transformers() -> None:
    rows, heads = engine.measure(True, 6, 1)
    assert {row["who"] for row in rows} == {"colonnade", "transformers"}
    assert rows[0]["agree"] == 1 and 0 <= rows[0]["idle"] <= 1
    assert heads[0].peer == "transformers"


@pytest.mark.slow
def test_flash_decoding_benchmark(tmp_path: Path) -> None:
    """Runs every mode with the plain executor on a CPU; the table of tiles is written back unchanged."""
    flash_decoding.main(["--tiny", "--fixed-cuts", "64", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "flash_decoding_tiny.json").read_text())["rows"]
    assert [row["who"] for row in rows] == ["colonnade", "colonnade, fixed cuts"] * 2
    assert (tmp_path / "flash_decoding.png").stat().st_size > 10_000
    (tmp_path / "flash_decoding.png").unlink()
    flash_decoding.main(["--tiny", "--draw", "--out", str(tmp_path)])
    assert (tmp_path / "flash_decoding.png").stat().st_size > 10_000, "drawn from the record alone"
    flash_decoding.main(["--tiny", "--sweep", "0", "6", "--pinned", "1", "--out", str(tmp_path)])
    cells = json.loads((tmp_path / "flash_decoding_sweep_tiny.json").read_text())["rows"]
    pinned = [row for row in cells if row.get("pinned_us")]
    assert len(cells) == 6 and len(pinned) == 1
    assert pinned[0]["of_pinned"] == pytest.approx(pinned[0]["pinned_us"] / pinned[0]["us"], abs=1e-3)
    assert not decode_tiles.OVERRIDE, "the pinned tiles are removed again"
    flash_decoding.main(["--tiny", "--sweep", "0", "8", "--resume", "--out", str(tmp_path)])
    more = json.loads((tmp_path / "flash_decoding_sweep_tiny.json").read_text())["rows"]
    assert sorted(row["cell"] for row in more) == list(range(8))
    assert all(row in more for row in cells), "cells of the record are kept"
    flash_decoding.main(["--tiny", "--sweep", "0", "8", "--resume", "--again", "3", "5", "--out", str(tmp_path)])
    again = json.loads((tmp_path / "flash_decoding_sweep_tiny.json").read_text())["rows"]
    assert sorted(row["cell"] for row in again) == list(range(8))
    assert all(row in again for row in more if row["cell"] not in (3, 5))
    flash_decoding.main(["--tiny", "--eight-bits", "--out", str(tmp_path)])
    caches = json.loads((tmp_path / "flash_decoding_eight_tiny.json").read_text())["rows"]
    assert [row["cache"] for row in caches] == ["bfloat16", "float8", "float8, scales", "int8, scales"]
    assert caches[0]["error"] < 1e-3 < caches[3]["error"] < caches[1]["error"] < 0.06
    flash_decoding.main(["--tiny", "--chunks", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "flash_decoding_chunks_tiny.json").read_text())["rows"]
    assert [row["who"] for row in rows] == ["colonnade", "sdpa, gathered"] * 2
    flash_decoding.main(["--tiny", "--latents", "--out", str(tmp_path)])
    assert len(json.loads((tmp_path / "flash_decoding_latents_tiny.json").read_text())["rows"]) == 2
    flash_decoding.main(["--tiny", "--shared", "--out", str(tmp_path)])
    assert len(json.loads((tmp_path / "flash_decoding_shared_tiny.json").read_text())["rows"]) == 3
    file = Path(decode_tiles.__file__).with_name("decode_tiles.json")
    assert tune.table_json(decode_tiles.table()) == file.read_text()


TINY_RUNS = [
    (attention, ["--tiny"]),
    (context, ["--tiny", "--worlds", "1"]),
    (decode_cpu_bandwidth, ["--tiny", "--weights", "bfloat16", "int4"]),
    (flash_decoding, ["--tiny"]),
    (flash_decoding, ["--tiny", "--chunks"]),
    (flash_decoding, ["--tiny", "--latents"]),
    (flash_decoding, ["--tiny", "--shared"]),
    (flash_decoding, ["--tiny", "--eight-bits"]),
    (flash_decoding, ["--tiny", "--sweep", "0", "2"]),
    (gptq_columns, ["--tiny"]),
    (moe_cpu, ["--tiny", "--shapes", "olmoe", "--dtypes", "float32", "--tokens", "1", "--rounds", "1"]),
    (moe_layer, ["--tiny", "--shapes", "qwen3", "--passes", "forward", "--who", "colonnade"]),
    (quantised_linear, ["--tiny"]),
    (skinny_gemm, ["--tiny"]),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("script", "argv"), TINY_RUNS, ids=lambda value: getattr(value, "__name__", None))
def test_tiny_runs_do_not_change_published_results(
    script: ModuleType,
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A tiny run writes to a temporary folder and prints its paths; published files do not change."""
    published = [RESULTS, ROOT / "docs" / "assets"]
    before = [{path: path.stat().st_mtime_ns for path in folder.iterdir()} for folder in published]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.argv", [script.__name__, *argv])
    script.main()
    assert [{path: path.stat().st_mtime_ns for path in folder.iterdir()} for folder in published] == before
    printed = capsys.readouterr().out
    for path in (path for path in tmp_path.rglob("*") if path.suffix in (".json", ".png", ".jsonl")):
        assert str(path) in printed, "the path of each file must be printed"


def test_labels_are_kept_apart() -> None:
    assert compress_benchmark.spread_labels([0, 1, 2.5], 1) == [0, 1, 2.5]
    places = compress_benchmark.spread_labels([0, 0.1, 0.2, 5], 1)
    assert places == pytest.approx([-0.9, 0.1, 1.1, 5]), "centred on their points, and the last stays"


def test_flash_decoding_rejects_unsupported_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    flash_decoding.main(["--tune", "--widths", "128"])
    assert "--tune measures a GPU's kernels, and this machine has no GPU" in capsys.readouterr().out
    for argv, message in (
        (["--tiny", "--tune", "--widths", "128"], "--tune measures a GPU's kernels for good, and has no toy size"),
        (["--tiny", "--flex"], "--flex needs a GPU"),
        (["--tiny", "--chunks", "--flex"], "which --chunks does not measure"),
        (["--tiny", "--draw"], "say --out FOLDER"),
        (["--chunks", "--shared"], "not allowed with"),
    ):
        with pytest.raises(SystemExit):
            flash_decoding.main(argv)
        assert message in " ".join(capsys.readouterr().err.split())


def test_page_lists_for_flashinfer() -> None:
    """A full last page counts as a page of tokens, not as 0; unused pages are not listed."""
    pages_BP = torch.tensor([[5, 3, 9], [0, 7, 1], [2, 8, 4], [6, 10, 11]], dtype=torch.int32)
    cu_pages_B1, pages_P, last_B = decode_cells.page_lists((9, 4, 1, 8), pages_BP, 4)
    assert cu_pages_B1.tolist() == [0, 3, 4, 5, 7]
    assert pages_P.tolist() == [5, 3, 9, 0, 2, 6, 10]
    assert last_B.tolist() == [1, 4, 1, 4]
    assert {x.dtype for x in (cu_pages_B1, pages_P, last_B)} == {torch.int32}


class FakeFlashInfer:
    """FlashInfer's wrapper in plain torch, with the same constructor, ``plan`` and ``run``."""

    def __init__(
        self, _workspace: Tensor, layout: str, *, use_tensor_cores: bool, use_cuda_graph: bool, **buffers
    ) -> None:
        assert layout == "NHD" and len(buffers) == (3 if use_cuda_graph else 0)
        self.tensor_cores = use_tensor_cores

    def plan(self, indptr, indices, last_page_len, N, K, H, page, *, q_data_type, kv_data_type) -> None:
        if not self.tensor_cores and N // K == 5:
            raise ValueError("Unsupported group_size: 5")
        self.lists, self.group, self.page = (indptr, indices, last_page_len), N // K, page

    def run(self, q_BNH: Tensor, pools: tuple[Tensor, Tensor]) -> Tensor:
        cu, pages, last = (x.tolist() for x in self.lists)
        parts = []
        for r, q_NH in enumerate(q_BNH.float()):
            keys = (cu[r + 1] - cu[r] - 1) * self.page + last[r]
            k_SNH, v_SNH = (
                x_PpKH[pages[cu[r] : cu[r + 1]]].flatten(0, 1)[:keys].float().repeat_interleave(self.group, 1)
                for x_PpKH in pools
            )
            s_NS = torch.einsum("nh,snh->ns", q_NH, k_SNH) * q_NH.shape[1] ** -0.5
            parts.append(torch.einsum("ns,snh->nh", s_NS.softmax(-1), v_SNH))
        return torch.stack(parts)


def test_flashinfer_reads_the_same_pages_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeFlashInfer))
    monkeypatch.setattr(decode_cells, "WORKSPACE_BYTES", 1)
    tensors = decode_cells.Tensors(decode_cells.Cell((40, 16, 1, 33), K=2, group=4, H=16, page=16), "cpu", copies=2)
    expected, ours = decode_cells.reference_output(tensors), decode_cells.ours(tensors)
    assert decode_cells.relative_error(ours, expected) > 0.1, "scattered pages give other keys"
    in_order, scattered = (dict(decode_cells.flashinfer(tensors, in_order=ordered)) for ordered in (True, False))
    names = ["flashinfer" + cores + mode for mode in ("", ", graph mode") for cores in ("", ", tensor cores")]
    assert list(in_order) == list(scattered) == names
    for name in names:
        assert decode_cells.relative_error(in_order[name], expected) < 1e-6
        for copy in range(2):
            o = scattered[name](copy)
            assert (o - ours(copy).float()).norm() < 2e-3 * o.norm(), f"{name}, copy {copy}"
    assert not set(names) - {name for name, _ in decode_cells.peers(tensors)}


def test_flashinfer_failures_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    monkeypatch.setattr(decode_cells, "WORKSPACE_BYTES", 1)
    tensors = decode_cells.Tensors(decode_cells.Cell((40, 3), K=1, group=5, H=16, page=16), "cpu")
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeFlashInfer))
    runs = dict(decode_cells.flashinfer(tensors))
    with pytest.raises(RuntimeError, match="ValueError: Unsupported group_size: 5"):
        runs["flashinfer"](0)
    assert runs["flashinfer, tensor cores"](0).shape == tensors.q_BNH.shape
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # installed, but its import fails
    for _, call in decode_cells.flashinfer(tensors):
        with pytest.raises(RuntimeError, match="flashinfer"):
            call(0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not list(decode_cells.flashinfer(tensors))
    assert not [name for name, _ in decode_cells.peers(tensors) if name.startswith("flashinfer")]


@pytest.mark.slow
def test_small_values_are_not_rounded_to_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ([], ["--eight-bits"], ["--latents"], ["--shared"]):
        flash_decoding.main(["--tiny", *mode, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "who colonnade  us " in printed and "{" not in printed
    for path in tmp_path.glob("*.json"):
        results = json.loads(path.read_text())
        assert all(row[key] for row in results["rows"] for key in ("tb_per_s", "of_read") if key in row), path.name
        assert "python benchmarks/" not in results["notes"] and "On a CPU ours is plain torch" in results["notes"]


def test_decode_model_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Speeds are compared with a bound that falls with the context; the plot skips failed peers."""
    rows, heads = decode_model.measure("tiny", Plan(), 2, [16, 64], 2, "cpu", peer=False, page=8)
    for row in rows:
        assert row["of_bound"] == pytest.approx(row["tokens_per_s"] / row["bound_tokens_per_s"], abs=2e-4)
        assert row["tb_per_s"] == pytest.approx(row["of_bound"] * row["bandwidth_tb_per_s"], abs=2e-3)
    assert rows[0]["bound_tokens_per_s"] > rows[1]["bound_tokens_per_s"] and heads[0].peer == "the bound"
    record = {"date": "2026-11-28", "rows": [*rows, {"who": "transformers, static cache", "failed": "it did"}]}
    (tmp_path / "decode_tiny_h200.json").write_text(json.dumps(record))
    decode_model.main(["--draw", "--out", str(tmp_path)])
    assert (tmp_path / "decode_models.png").stat().st_size > 10_000, "drawn from records alone, despite a failed peer"
    with pytest.raises(SystemExit):
        decode_model.main(["--draw", "--out", str(tmp_path / "empty")])
    assert "has no record of this benchmark: measure first" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_compress_benchmark(tmp_path: Path) -> None:
    compress_benchmark.main(["--tiny", "--out", str(tmp_path)])
    rows = {row["what"]: row for row in json.loads((tmp_path / "compress_tiny.json").read_text())["rows"]}
    assert rows["stored, float32"]["kl_nats"] == 0
    assert rows["int8 nearest"]["kl_nats"] < rows["int4 g64 nearest"]["kl_nats"]
    assert rows["int8 nearest"]["weight_bytes"] > rows["int4 g64 gptq"]["weight_bytes"]
    assert rows["transformers, our int4 g64 nearest, symmetric"]["logits_off"] < 1e-5
    assert all(row["tokens_per_cpu_s"] > 0 for row in rows.values())
    assert (tmp_path / "compress_ladder.png").stat().st_size > 10_000
    kept = (tmp_path / "compress_rows.jsonl").read_text().splitlines()
    assert len(kept) == 2 * len(rows)  # quality and speed
    (tmp_path / "compress_rows.jsonl").write_text("\n".join(kept[:3]) + "\n")
    compress_benchmark.main(["--tiny", "--out", str(tmp_path)])  # goes on with the second row's speed
    again = json.loads((tmp_path / "compress_tiny.json").read_text())["rows"]
    assert [row["what"] for row in again] == list(rows)


@pytest.mark.slow
def test_expert_compression_benchmark(tmp_path: Path) -> None:
    expert_compression.main(["--tiny", "--out", str(tmp_path)])
    rows = {row["what"]: row for row in json.loads((tmp_path / "expert_compression.json").read_text())["rows"]}
    assert rows["all experts"]["kl_nats"] == 0
    size = {what: row["expert_bytes"] for what, row in rows.items()}
    assert size["keep 2, reap"] == size["merge 2"] == size["all experts"] // 4
    assert size["ternary 0.5 bits"] < size["ternary 0.889 bits"] < size["int4 g32 gptq, keep 2 by reap"]
    assert all(row["perplexity"] > 1 for row in rows.values())


@pytest.mark.slow
def test_moe_to_dense_benchmark(tmp_path: Path) -> None:
    moe_to_dense.main(["--tiny", "--seeds", "0", "--out", str(tmp_path)])
    rows = {row["what"]: row for row in json.loads((tmp_path / "moe_to_dense.json").read_text())["rows"]}
    assert list(rows) == ["mixture", "dense", *moe_to_dense.STUDENTS]
    gain = rows["dense"]["nats"] - rows["mixture"]["nats"]
    # Nats are rounded to four digits, and the gain of four steps is as small.
    kept = (rows["dense"]["nats"] - rows["student"]["nats"]) / gain if gain else math.inf
    assert rows["student"]["kept_percent"] * kept > 0
    fitted = {row["start_nats"] for what, row in rows.items() if what == "student" or what.startswith("fitted")}
    others = {row["start_nats"] for what, row in rows.items() if what.startswith(("random", "Switch"))}
    assert len(fitted) == len(others) == 1


def test_ternary_rows_benchmark(tmp_path: Path) -> None:
    ternary_rows.main(["--tiny", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "ternary_rows.json").read_text())["rows"]
    assert {row["weights"] for row in rows} == set(ternary_rows.KINDS)


def test_int8_step_benchmark(tmp_path: Path) -> None:
    int8_step.main(["--tiny", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "int8_step_cpu.json").read_text())["rows"]
    assert row["ratio"] > 0


def test_quantised_quality_benchmark(tmp_path: Path) -> None:
    """A shuffled model gives the same logits in other quantisation groups; KL to itself is 0."""
    config = decode_model.TINY.replace(width=64, tied=True)

    def model() -> api.Model:
        return api.Model(build(config, dtype=torch.float64), None, DistributedContext.solo(torch.device("cpu")), "tiny")

    one, other = model(), quantised_quality.shuffled(model())
    tokens = torch.arange(40) * 7 % 97
    assert (one.logits(tokens) - other.logits(tokens)).abs().max() < 1e-12
    differ = [
        name for name, weight in one.transformer.named_parameters()
        if not torch.equal(weight, other.transformer.get_parameter(name))
    ]  # fmt: skip
    assert {name.split(".")[-2] for name in differ} >= {"tokens", "qkv", "out", "gate", "up", "down"}
    api.save(one, tmp_path / "one")
    rough = api.load(tmp_path / "one", dtype="float64", device="cpu", weights="int4", weight_group=32)
    settings = {"weights": "int4", "group": 32, "order": "shuffled", "bits": 5.0}
    windows = tokens.unfold(0, 11, 10)
    stored, same, quantised = quantised_quality.compare(one, [(other, settings), (rough, settings)], windows)
    assert stored["tokens"] == 30 and stored["perplexity"] == same["perplexity"]
    assert same["kl_nats"] == 0 < quantised["kl_nats"] and same["same_first"] == 1 >= quantised["same_first"]
    assert stored["perplexity"] == pytest.approx(
        math.exp(sum(one.score(window.tolist()).nll for window in windows) / 30), abs=1e-3
    )
    assert quantised_quality.bits(one, "int8", 64) == pytest.approx(8 + 32 / 60, abs=0.3)


@pytest.mark.filterwarnings("ignore")  # warnings of the peer library
def test_prefill_benchmark() -> None:
    """FLOPs count every token's products, the output head of one token, and the visible scores."""
    T, config = 96, prefill.TINY
    D, H, heads = config.width, config.head_width, config.heads + 2 * config.kv_heads
    weights = config.layers * (D * heads * H + config.heads * H * D + 3 * D * config.ffn_width)
    visible = config.layers * config.heads * H * 4 * T * T / 2
    assert prefill.flops(config, T) == pytest.approx(2 * T * weights + 2 * D * config.vocab_size + visible, rel=1e-3)
    rows, results = prefill.measure("tiny", T, "cpu")
    assert [row["who"] for row in rows] == ["colonnade", "transformers"]
    assert results[0].value == rows[0]["tokens_per_s"] and results[0].peer_value == rows[1]["tokens_per_s"]


@pytest.fixture
def own_threads() -> Iterator[None]:
    """The benchmark sets torch's number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_benchmark_of_streams_measures(tmp_path: Path, own_threads: None) -> None:
    pytest.importorskip("av")
    pytest.importorskip("PIL")
    speech_streams.main(["--tiny", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "speech_streams_cpu.json").read_text())["rows"]
    kinds = (
        ["one live stream"] * (2 + speech_streams.has_camera())
        + ["front ends"] * 2
        + ["encoder step"] * 2
        + ["streams"]
    )
    assert [row["what"] for row in rows] == kinds
    assert 1 < rows[0]["letters_per_s"] < 60


@pytest.mark.slow
def test_the_benchmark_of_speech_trains_and_measures(tmp_path: Path) -> None:
    pytest.importorskip("espeakng_loader")
    speech.main(["--tiny", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "speech_cpu.json").read_text())["rows"]
    assert [row["what"] for row in rows] == [
        "speaking",
        "training",
        *["word errors"] * 10,
        *["times of words"] * 2,
        *["streams"] * 4,
    ]
    assert all(row["equal_to_whole"] == row["recordings"] for row in rows if row["what"] == "streams")
    speech.main(["--draw", "--out", str(tmp_path), "--picture", str(tmp_path / "speech.png")])
    assert (tmp_path / "speech.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_benchmark_of_delays_trains_and_measures(tmp_path: Path, own_threads: None) -> None:
    pytest.importorskip("espeakng_loader")
    speech_delay.main(["--tiny", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "speech_delay_cpu.json").read_text())["rows"]
    pairs = [(S, R) for S in (4, 8, 16, 32) for R in (0, 2, 4)] + [(128, 0)]
    assert [row["what"] for row in rows] == ["speaking", "training", *["streams"] * 12, "whole sentences"]
    assert [(row["segment"], row["lookahead"]) for row in rows[2:]] == pairs
    assert all(row["equal_to_whole"] == row["recordings"] == 2 for row in rows[2:])
    assert rows[3]["worst_algorithmic_latency_s"] == pytest.approx(0.24)
    speech_delay.main(["--draw", "--out", str(tmp_path), "--picture", str(tmp_path / "delay.png")])
    assert (tmp_path / "delay.png").stat().st_size > 10_000


def test_decode_plot_shows_the_newest_row_of_each_context(tmp_path: Path) -> None:
    for stem, date, contexts in (
        ("a_long", "2026-11-22", (512, 8192)),
        ("b", "2026-11-28", (512,)),
        ("c", "2026-11-21", (512,)),
    ):
        rows = [{"who": "colonnade", "model": "m", "context": n, "tokens_per_s": int(date[-2:])} for n in contexts]
        (tmp_path / f"decode_{stem}_h200.json").write_text(json.dumps({"date": date, "rows": rows}))
    found = {row["context"]: row["tokens_per_s"] for row in decode_model.recorded(tmp_path)}
    assert found == {512: 28, 8192: 22}
