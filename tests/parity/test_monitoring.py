"""Monitoring of a run: profile and table, memory and data in each row, trackers, out-of-memory reports."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib import colors, image

from colonnade.config import DataConfig, ModelConfig, Plan, RunConfig, TrainConfig
from colonnade.errors import CapacityError, ConfigError
from colonnade.parallel.axis import world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train import Trainer, run_log
from colonnade.train import out_of_memory as memory
from colonnade.train.loop import StopSignal, train
from colonnade.train.memory_estimate import estimate
from colonnade.train.trackers import (
    METRICS,
    SERVICES,
    TRAIN_COLOR,
    VALIDATION_COLOR,
    draw_loss_curve,
    read_rows,
)
from colonnade.train.training_state import TrainingState
from tests import corpora
from tests.worlds import run as in_world

MODEL = ModelConfig(vocab_size=300, layers=4, width=16, heads=4, kv_heads=4, ffn_width=24, context=32, tied=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpora.small(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> RunConfig:
    t = TrainConfig(steps=8, batch=8, micro_batch=4, lr=1e-2, min_lr=1e-3, warmup=2, log_every=2, eval_every=0)
    return RunConfig(
        name="it", runs=tmp_path, device="cpu", model=MODEL, data=DataConfig(path=corpus, sequence=16), train=t
    )


# -- profile ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_profile_of_two_ranks(config: RunConfig) -> None:
    config = config.replace(plan=Plan(tp=2), train=config.train.replace(profile=2))
    in_world(2, train, config)
    rows = {row["step"]: row for row in read_rows(config.folder)}
    profiled = [row for row in read_rows(config.folder) if "compute_s" in row]
    assert [row["step"] for row in profiled] == [5], "two steps are traced after three"
    (row,) = profiled
    kinds = ("compute", "communication_exposed", "data_exposed", "idle")
    assert sum(row[f"{kind}_s"] for kind in kinds) == pytest.approx(row["step_s"])
    assert row["matmul_s"] > 0 and row["attention_s"] > 0 and row["optimizer_s"] > 0
    assert row["communication_exposed_s"] > 0, "tensor parallelism on a CPU overlaps nothing"
    for rank in range(2):
        with gzip.open(config.folder / "profile" / f"rank-{rank}.json.gz", "rt") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"aten::mm", "gloo:all_reduce", "reads samples"} <= names
    assert list(rows) == list(range(1, 9)), "the run continued"


@pytest.mark.slow
def test_profile_table_is_printed_or_its_absence_explained(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(config.replace(train=config.train.replace(profile=1))).fit()
    output = capsys.readouterr().out
    assert "1 steps traced" in output and "matmul" in output and "rank-0.json.gz" in output
    assert "exposed communication" not in output, "one process has no communication"
    Trainer(config.replace(name="short", train=config.train.replace(steps=4, warmup=0, profile=2))).fit()
    output = capsys.readouterr().out
    assert "no profile: it needs 5 steps, and 4 are left" in output
    assert "traced" not in output


def test_rows_contain_memory_and_data_wait(config: RunConfig) -> None:
    Trainer(config).fit()
    rows = read_rows(config.folder)
    assert all(1 << 26 < row["memory_peak_bytes"] < 1 << 40 and row["data_s"] > 0 for row in rows)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("silence_s", "shown"), [(1e9, [8]), (0.0, list(range(1, 9)))])
def test_a_step_is_shown_after_a_silence(
    silence_s: float,
    shown: list[int],
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also between two lines that are due; the trackers get the same rows."""
    monkeypatch.setattr(run_log, "SILENCE_S", silence_s)
    Trainer(config.replace(train=config.train.replace(log_every=100))).fit()
    steps = [
        int(line.split()[1].partition("/")[0]) for line in capfd.readouterr().out.splitlines() if line[:5] == "step "
    ]
    assert steps == shown
    assert [row["step"] for row in read_rows(config.folder)] == list(range(1, 9))


def _polled() -> list[bool]:
    """What two ranks decide when only the first one has been silent for long, and when none has."""
    with StopSignal(world_axis()) as stop:
        return [stop.poll(silent=torch.distributed.get_rank() == 0 and silent)[1] for silent in (True, False)]


def test_all_ranks_show_metrics_after_the_same_step() -> None:
    assert in_world(2, _polled) == [[True, False]] * 2


# -- out of memory ----------------------------------------------------------------------------------------------------


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 2 GiB")


def oom_report(training: TrainingState, step: int) -> str:
    """The report when an allocation fails in the forward pass of ``step``."""
    for _ in range(step - 1):
        training.step()
    next(training.model.blocks.children()).register_forward_hook(out_of_memory)
    with pytest.raises(CapacityError) as caught:
        training.step()
    return str(caught.value)


def numel(training: TrainingState) -> int:
    return sum(w.numel() for w in training.masters.local.values())


def oom_reports(config: RunConfig) -> tuple[str, int]:
    with DistributedContext.build(config.plan, "cpu") as context:
        training = TrainingState(config, context)
        return oom_report(training, 2), numel(training)


def amount(output: str, row: str) -> str:
    (line,) = [line for line in output.splitlines() if line.strip().startswith(row)]
    return " ".join(line.removeprefix(f"  {row}").split()[:2])


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [Plan(), Plan(tp=2), Plan(dp=2)], ids=str)
def test_oom_report_lists_what_fills_the_memory(config: RunConfig, plan: Plan) -> None:
    for output, n in in_world(plan.world, oom_reports, config.replace(plan=plan)):
        first = output.splitlines()[0]
        assert first == "out of memory on cpu in step 2, which requested 1.5 GiB more. It is filled by"
        assert amount(output, "master weights") == memory.format_bytes(4 * n)
        assert amount(output, "moments") == memory.format_bytes(2 * 4 * n)
        assert amount(output, "requested") == "1.5 GiB"
        assert "gradients" not in output, "gradients were freed after step 1, and this is a forward pass"
        assert "by the same estimate" in output


def test_oom_in_a_run_raises_capacity_error(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)  # more than any machine has: torch's own message

    monkeypatch.setattr("colonnade.train.optimizer_step.clip_grads_", fails)
    with pytest.raises(CapacityError, match=r"which requested 1\.074e\+09 GiB more") as caught:
        Trainer(config).fit()
    assert "gradients" in str(caught.value), "gradients exist after the backward pass"
    monkeypatch.setattr("colonnade.train.optimizer_step.clip_grads_", lambda *_: [].pop())
    with pytest.raises(IndexError):
        Trainer(config.replace(name="bug")).fit()


def _oom_at_start(config: RunConfig) -> tuple[str, dict[str, int], memory.MemoryBreakdown]:
    """The report when the moments cannot be allocated, the estimate, and the memory of a run that starts."""
    with DistributedContext.build(config.plan, "cpu") as context:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("colonnade.train.training_state.make_optimizer", out_of_memory)
            with pytest.raises(CapacityError) as caught:
                TrainingState(config, context)
        training, estimated = TrainingState(config, context), estimate(config, "cpu", context.axes.pp.rank).device
        found = memory.memory_breakdown(
            training.model, training.masters, training.optimizer, context.device, MemoryError()
        )
        return str(caught.value), estimated, found


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plan", [Plan(), Plan(tp=2), Plan(dp=2), Plan(pp=2), Plan(cp=2)], ids=str)
def test_oom_before_the_first_step(config: RunConfig, plan: Plan, dtype: str) -> None:
    """The tensors are counted before they are allocated, to the byte."""
    config = config.replace(plan=plan, train=config.train.replace(dtype=dtype))
    for rank, (output, estimated, held) in enumerate(in_world(plan.world, _oom_at_start, config)):
        first = output.splitlines()[0]
        assert first.startswith("out of memory on cpu before the first step, which requested 1.5 GiB more. By the mem")
        if plan.dp * plan.cp == 1:
            assert estimated.get("weights to compute with", 0) == held.weights
        if plan.dp * plan.cp == 1 or rank == 0:  # the first shard is the largest
            assert (estimated["master weights"], estimated["moments"]) == (held.masters, held.moments)
        most = max(held.moments, estimated["moments"])
        assert (
            amount(output, "moments") in (memory.format_bytes(held.moments), memory.format_bytes(most)) or plan.pp > 1
        )


def test_oom_in_a_validation(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colonnade.train.training_state.evaluate", out_of_memory)
    with pytest.raises(CapacityError, match=r"on cpu in the validation after step 4, which requested 1\.5 GiB more"):
        Trainer(config.replace(train=config.train.replace(eval_every=4))).fit()


def test_no_host_memory_for_async_save(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def pinned(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("colonnade.checkpoint.async_save.AsyncSave.stage", pinned)
    with pytest.raises(
        CapacityError,
        match=r"not enough host memory for the copy from which step-8 is written.* set --train.no_async_save",
    ):
        Trainer(config).fit()
    assert Trainer(config.replace(train=config.train.replace(async_save=False))).fit().steps == 8


def test_oom_wrapped_by_a_pipeline_is_found() -> None:
    oom = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    wrapped = RuntimeError("Stage 0 failed to run forward")
    wrapped.__cause__ = oom
    assert memory.find_oom_error(wrapped) is oom
    assert memory.find_oom_error(RuntimeError("the sizes do not agree")) is None


def test_advice_lists_only_sufficient_remedies(config: RunConfig) -> None:
    """Scaled by how much more the run needed than estimated; more ranks on the same host do not help."""
    model = MODEL.replace(width=64, layers=8, ffn_width=256, context=512)
    data, cpu = config.data.replace(sequence=512), torch.device("cpu")
    config = config.replace(model=model, data=data, train=config.train.replace(async_save=False))
    estimated = sum(estimate(config, "cpu").device.values())
    output = memory._advice(config, cpu, needed=10 * estimated, free=7 * estimated)
    assert "--train.recompute full" in output and "--train.micro_batch 2" in output
    assert "--plan.dp 4  (on 4 hosts like this one, by torchrun" in output
    assert f"{memory.format_bytes(7 * estimated)}" not in output
    less = memory._advice(config, cpu, needed=10 * estimated, free=estimated // 10)
    assert "--train.micro_batch 2 " not in less


# -- trackers ---------------------------------------------------------------------------------------------------------


def test_missing_tracker_package_fails_before_training(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mlflow").mkdir()  # a folder of that name is not a package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        wanted = config.replace(train=config.train.replace(trackers=(name,)))
        with pytest.raises(ConfigError, match=f"'{name}' is not installed.*colonnade\\[track\\]"):
            Trainer(wanted)
    assert not config.folder.exists()
    with pytest.raises(ConfigError, match="trackers"):
        config.train.replace(trackers=("tensorboard",))


class FailingTracker:
    """A service that becomes unreachable after step 2."""

    def __init__(self, folder: Path, resumed_step: int, *, config: Any):
        self.steps: list[int] = []

    def record(self, step: int, values: Any) -> None:
        if step > 2:
            raise ConnectionError("no route to host\nand much more")

    def close(self) -> None:
        raise AssertionError("a failed tracker must not be closed")


def test_failing_tracker_is_dropped(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SERVICES, "mlflow", FailingTracker)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: SimpleNamespace(origin="there"))
    assert Trainer(config.replace(train=config.train.replace(trackers=("mlflow",)))).fit().steps == 8
    output = capsys.readouterr().err
    assert output.count("mlflow") == 1
    assert (
        "mlflow failed with ConnectionError: no route to host; no metrics are sent from step 3 on; metrics.json"
        in output
    )
    assert [row["step"] for row in read_rows(config.folder)] == list(range(1, 9))


SERVICE_SCRIPT = """
import json, os, sys, warnings
from pathlib import Path
from colonnade.config import RunConfig
from colonnade.train import Trainer
if __name__ == "__main__":
    run = RunConfig.model_validate_json(sys.argv[1])
    Trainer(run).fit()
    Trainer(run.replace(train=run.train.replace(steps=12))).fit()
    if "mlflow" in run.train.trackers:
        import mlflow
        client = mlflow.MlflowClient()
        (it,) = client.search_runs(["0"])
        print(json.dumps({
            "losses": [(point.step, point.value) for point in client.get_metric_history(it.info.run_id, "loss")],
            "lr": it.data.params["train.lr"], "name": it.info.run_name, "status": it.info.status,
        }))
"""


def run_with_tracker(config: RunConfig, name: str, **settings: str) -> str:
    """Run with tracker ``name``, and resume, in a separate process; returns its output."""
    pytest.importorskip(name, reason=f"needs the package {name}: pip install 'colonnade[track]'", exc_type=ImportError)
    script = config.runs / "script.py"
    script.write_text(SERVICE_SCRIPT)
    run_json = config.replace(train=config.train.replace(trackers=(name,))).model_dump_json()
    done = subprocess.run(
        [sys.executable, str(script), run_json], cwd=config.runs, env=os.environ | settings, capture_output=True,
        text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_mlflow_gets_each_step_once(config: RunConfig) -> None:
    address = (config.runs / "mlruns").as_uri()
    output = run_with_tracker(config, "mlflow", MLFLOW_TRACKING_URI=address, MLFLOW_ALLOW_FILE_STORE="true")
    found = json.loads(output.splitlines()[-1])
    rows = [(row["step"], row["loss"]) for row in read_rows(config.folder) if "loss" in row]
    assert sorted(map(tuple, found["losses"])) == rows
    assert [step for step, _ in rows] == list(range(1, 13))
    assert (found["lr"], found["name"], found["status"]) == ("0.01", "it", "FINISHED")


@pytest.mark.slow
def test_wandb_writes_its_own_files(config: RunConfig) -> None:
    run_with_tracker(config, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    folders = sorted((config.folder / "wandb").glob("offline-run-*"))
    assert len(folders) == 2, "one per start of the run"
    name = (config.folder / "wandb-id").read_text()
    assert all(folder.name.endswith(name) for folder in folders), "with the same run id"
    written = b"".join(file.read_bytes() for folder in folders for file in folder.glob("*.wandb"))
    assert b"grad_norm" in written and b"memory_peak_bytes" in written


def test_loss_curve_shows_training_and_validation(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 3.0 - step / 4, "lr": 1e-3, "grad_norm": 1.0} for step in range(1, 9)]
    rows += [{"step": step, "validation_loss": 3.5 - step / 4} for step in (4, 8)]
    (tmp_path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = draw_loss_curve(tmp_path, "it")
    assert picture is not None
    pixels_YXC = image.imread(picture)[..., :3]
    for color in (TRAIN_COLOR, VALIDATION_COLOR):
        assert (abs(pixels_YXC - colors.to_rgb(color)) < 0.01).all(-1).sum() > 100, color
