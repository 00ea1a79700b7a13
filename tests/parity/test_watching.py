"""What a run tells of itself: a profile and its table, memory in each row, trackers, and running out of memory."""

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

from colonnade.config import DataConfig, ModelConfig, Plan, RunConfig, TrainConfig
from colonnade.errors import CapacityError, ConfigError
from colonnade.parallel.mesh import Ground
from colonnade.train import Trainer, memory
from colonnade.train.fits import expected
from colonnade.train.loop import train
from colonnade.train.session import Session
from colonnade.train.trackers import NAMED, read_rows
from tests import corpora
from tests.worlds import run as in_world

pytestmark = pytest.mark.xdist_group("worlds")

MODEL = ModelConfig(vocab_size=300, layers=4, width=16, heads=4, kv_heads=4, ffn_width=24, context=32, tied=True)
GIB = 1 << 30


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


def test_a_profile_of_two_ranks(config: RunConfig) -> None:
    config = config.but(plan=Plan(tp=2), train=config.train.but(profile=2))
    in_world(2, train, config)
    rows = {row["step"]: row for row in read_rows(config.folder)}
    tabled = [row for row in read_rows(config.folder) if "compute_s" in row]
    assert [row["step"] for row in tabled] == [5], "after three steps, two are traced"
    (row,) = tabled
    kinds = ("compute", "communication_exposed", "data_exposed", "idle")
    assert sum(row[f"{kind}_s"] for kind in kinds) == pytest.approx(row["step_s"])
    assert row["matmul_s"] > 0 and row["attention_s"] > 0 and row["optimizer_s"] > 0
    assert row["communication_exposed_s"] > 0, "tensor parallelism on a CPU hides nothing"
    for rank in range(2):
        with gzip.open(config.folder / "profile" / f"rank-{rank}.json.gz", "rt") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"aten::mm", "gloo:all_reduce", "reads samples"} <= names
    assert list(rows) == list(range(1, 9)), "the run went on"


def test_the_table_is_shown_and_a_short_run_says_why_there_is_none(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(config.but(train=config.train.but(profile=1))).fit()
    said = capsys.readouterr().out
    assert "1 steps traced" in said and "matmul" in said and "rank-0.json.gz" in said
    assert "exposed communication" not in said, "one process has none"
    Trainer(config.but(name="short", train=config.train.but(steps=4, warmup=0, profile=2))).fit()
    said = capsys.readouterr().out
    assert "no profile: it takes 5 steps, and 4 are left" in said
    assert "traced" not in said


def test_rows_tell_memory_and_data(config: RunConfig) -> None:
    Trainer(config).fit()
    rows = read_rows(config.folder)
    assert all(1 << 26 < row["memory_peak_bytes"] < 1 << 40 and row["data_s"] > 0 for row in rows)


# -- out of memory ----------------------------------------------------------------------------------------------------


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 2 GiB")


def starved(session: Session, step: int) -> str:
    """What is said when an allocation fails in the forward pass of ``step``."""
    for _ in range(step - 1):
        session.step()
    next(session.model.blocks.children()).register_forward_hook(out_of_memory)
    with pytest.raises(CapacityError) as caught:
        session.step()
    return str(caught.value)


def numel(session: Session) -> int:
    return sum(w.numel() for w in session.masters.local.values())


def check_starved(config: RunConfig) -> tuple[str, int]:
    with Ground.build(config.plan, "cpu") as ground:
        session = Session(config, ground)
        return starved(session, 2), numel(session)


def amount(said: str, row: str) -> str:
    (line,) = [line for line in said.splitlines() if line.strip().startswith(row)]
    return " ".join(line.removeprefix(f"  {row}").split()[:2])


@pytest.mark.parametrize("plan", [Plan(), Plan(tp=2), Plan(dp=2)], ids=str)
def test_an_account_of_what_filled_the_memory(config: RunConfig, plan: Plan) -> None:
    for said, n in in_world(plan.world, check_starved, config.but(plan=plan)):
        first = said.splitlines()[0]
        assert first == "out of memory on cpu in step 2, which wanted 1.5 GiB more. It is filled by"
        assert amount(said, "master weights") == memory.size(4 * n)
        assert amount(said, "moments") == memory.size(2 * 4 * n)
        assert amount(said, "wanted besides") == "1.5 GiB"
        assert "gradients" not in said, "they were dropped after step 1, and this is a forward pass"
        remedies = said.split("would save:\n")[1].splitlines()
        assert len(remedies) == 3
        assert remedies[0].split()[0] in ("--train.micro_batch", "--train.recompute")
        assert f"{2 * plan.world} processes instead of {plan.world}" in remedies[2]


def test_a_run_ends_with_it(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)  # which no machine has: torch's own message

    monkeypatch.setattr("colonnade.train.norm.clip_", fails)
    with pytest.raises(CapacityError, match=r"which wanted 1\.074e\+09 GiB more") as caught:
        Trainer(config).fit()
    assert "gradients" in str(caught.value), "after the backward pass they are there"
    monkeypatch.setattr("colonnade.train.norm.clip_", lambda *_: [].pop())
    with pytest.raises(IndexError):
        Trainer(config.but(name="bug")).fit()


def _begins(config: RunConfig) -> tuple[str, dict[str, int], dict[str, int]]:
    """What is said where there is no room for the moments, what was expected, and what a session that begins holds."""
    with Ground.build(config.plan, "cpu") as ground:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("colonnade.train.session.moving", out_of_memory)
            with pytest.raises(CapacityError) as caught:
                Session(config, ground)
        account, session = vars(expected(config, ground)), Session(config, ground)
        found = memory.take_account(session.model, session.masters, session.optimizer, ground.device, MemoryError())
        kinds = ("masters", "weights", "moments", "sharded_masters")
        return str(caught.value), {kind: account[kind] for kind in kinds}, {k: vars(found)[k] for k in kinds}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plan", [Plan(), Plan(tp=2), Plan(dp=2), Plan(pp=2), Plan(cp=2)], ids=str)
def test_a_run_that_is_too_large_to_begin(config: RunConfig, plan: Plan, dtype: str) -> None:
    """Its tensors are counted before they are there, to the byte."""
    config = config.but(plan=plan, train=config.train.but(dtype=dtype))
    for said, foretold, held in in_world(plan.world, _begins, config):
        first = said.splitlines()[0]
        assert first.startswith("out of memory on cpu before the first step, which wanted 1.5 GiB more. A step takes, ")
        assert foretold == held
        assert amount(said, "moments") == memory.size(held["moments"])
        assert f"{2 * plan.world} processes instead of {plan.world}" in said.split("would save:\n")[1]


def test_a_validation_that_runs_out_of_memory(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colonnade.train.session.evaluate", out_of_memory)
    with pytest.raises(CapacityError, match=r"on cpu in the validation after step 4, which wanted 1\.5 GiB more"):
        Trainer(config.but(train=config.train.but(eval_every=4))).fit()


def test_no_room_for_a_copy_to_save(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def pinned(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("colonnade.checkpoint.background.Background.stage", pinned)
    with pytest.raises(
        CapacityError, match=r"no host memory for a copy of what step-8 is made of.* set --train.async_save false"
    ):
        Trainer(config).fit()
    assert Trainer(config.but(train=config.train.but(async_save=False))).fit().steps == 8


def test_what_a_pipeline_wraps_is_found() -> None:
    lack = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    wrapped = RuntimeError("Stage 0 failed to run forward")
    wrapped.__cause__ = lack
    assert memory.lack_of_memory(wrapped) is lack
    assert memory.lack_of_memory(RuntimeError("the sizes do not agree")) is None


ACCOUNT = memory.Account(
    masters=8 * GIB, weights=4 * GIB, gradients=8 * GIB, moments=16 * GIB, activations=40 * GIB, unused=3 * GIB,
    others=GIB, wanted=0, capacity=80 * GIB, sharded_masters=6 * GIB,
)  # fmt: skip


def saved(config: RunConfig, device: str = "cuda") -> dict[str, float]:
    return {change.flags: change.saves / GIB for change in memory.changes(config, ACCOUNT, torch.device(device))}


def test_what_each_change_would_save(config: RunConfig) -> None:
    found = saved(config.but(train=config.train.but(dtype="bfloat16")))
    tokens_bytes = 4 * 4 * 16 * 16 * 2  # 4 blocks keep their input of 4 samples of 16 tokens of 16 numbers
    assert found["--train.micro_batch 2"] == 20
    assert found["--train.recompute full"] == pytest.approx(30 - tokens_bytes / GIB)
    assert found["--train.offload optimizer"] == 16 - 0.75
    assert found["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"] == 3
    assert found["--plan.dp 2"] == 16, "of masters, gradients and moments"
    assert found["--plan.cp 2"] == 16 + 20
    # 6/8 of 32 GiB are cut; of 34 bytes 22 stay
    assert found["--plan.tp 2"] == pytest.approx(12 + 40 * (1 - 22 / 34))
    assert "--train.dtype bfloat16" not in found
    found = saved(config.but(plan=Plan(tp=2)))
    assert found["--plan.sequence_parallel"] == pytest.approx(40 * (1 - 17 / 22))
    assert found["--train.dtype bfloat16"] == 20 - 4
    assert "--train.offload optimizer" not in saved(config, "cpu"), "a CPU has nowhere to move them"


def test_only_what_the_run_may_be_is_offered(config: RunConfig) -> None:
    found = saved(config.but(plan=Plan(tp=4), train=config.train.but(batch=3, micro_batch=1, recompute="full")))
    assert not {"--plan.dp 2", "--plan.tp 8", "--train.micro_batch 0", "--train.recompute full"} & set(found)


def test_two_changes_on_the_same_machine_and_one_with_more() -> None:
    here = [memory.Change(f"here {i}", 9 - i, 1) for i in range(4)]
    more = [memory.Change(f"more {i}", 99 - i, 2) for i in range(4)]
    assert [change.flags for change in memory.best(here + more, 1)] == ["here 0", "here 1", "more 0"]
    assert [change.flags for change in memory.best(here, 1)] == ["here 0", "here 1", "here 2"]
    assert [change.flags for change in memory.best(here[:1] + more, 1)] == ["here 0", "more 0", "more 1"]


# -- trackers ---------------------------------------------------------------------------------------------------------


def test_a_missing_package_is_said_before_training(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mlflow").mkdir()  # a folder of that name is no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        wanted = config.but(train=config.train.but(trackers=(name,)))
        with pytest.raises(ConfigError, match=f"'{name}' is not installed.*colonnade\\[track\\]"):
            Trainer(wanted)
    assert not config.folder.exists()
    with pytest.raises(ConfigError, match="trackers"):
        config.train.but(trackers=("tensorboard",))


class Fails:
    """A service that goes away after step 2."""

    def __init__(self, folder: Path, resumed_step: int, *, config: Any):
        self.steps: list[int] = []

    def record(self, step: int, values: Any) -> None:
        if step > 2:
            raise ConnectionError("no route to host\nand much more")

    def close(self) -> None:
        raise AssertionError("it is told no more")


def test_a_service_that_fails_is_left_behind(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(NAMED, "mlflow", Fails)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: SimpleNamespace(origin="there"))
    assert Trainer(config.but(train=config.train.but(trackers=("mlflow",)))).fit().steps == 8
    said = capsys.readouterr().err
    assert said.count("mlflow") == 1
    assert (
        "mlflow failed with ConnectionError: no route to host; from step 3 on it is told no more, metrics.json" in said
    )
    assert [row["step"] for row in read_rows(config.folder)] == list(range(1, 9))


SERVICES = """
import json, os, sys, warnings
from pathlib import Path
from colonnade.config import RunConfig
from colonnade.train import Trainer
if __name__ == "__main__":
    run = RunConfig.model_validate_json(sys.argv[1])
    Trainer(run).fit()
    Trainer(run.but(train=run.train.but(steps=12))).fit()
    if "mlflow" in run.train.trackers:
        import mlflow
        client = mlflow.MlflowClient()
        (it,) = client.search_runs(["0"])
        print(json.dumps({
            "losses": [(point.step, point.value) for point in client.get_metric_history(it.info.run_id, "loss")],
            "lr": it.data.params["train.lr"], "name": it.info.run_name, "status": it.info.status,
        }))
"""


def served(config: RunConfig, name: str, **settings: str) -> str:
    """A run with tracker ``name``, and its resumption, in a process of their own; what it prints."""
    pytest.importorskip(name, reason=f"needs the package {name}: pip install 'colonnade[track]'", exc_type=ImportError)
    script = config.runs / "script.py"
    script.write_text(SERVICES)
    given = config.but(train=config.train.but(trackers=(name,))).model_dump_json()
    done = subprocess.run(
        [sys.executable, str(script), given], cwd=config.runs, env=os.environ | settings, capture_output=True,
        text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_mlflow_gets_each_step_once(config: RunConfig) -> None:
    address = (config.runs / "mlruns").as_uri()
    said = served(config, "mlflow", MLFLOW_TRACKING_URI=address, MLFLOW_ALLOW_FILE_STORE="true")
    found = json.loads(said.splitlines()[-1])
    rows = [(row["step"], row["loss"]) for row in read_rows(config.folder) if "loss" in row]
    assert sorted(map(tuple, found["losses"])) == rows
    assert [step for step, _ in rows] == list(range(1, 13))
    assert (found["lr"], found["name"], found["status"]) == ("0.01", "it", "FINISHED")


@pytest.mark.slow
def test_wandb_writes_its_own_files(config: RunConfig) -> None:
    served(config, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    folders = sorted((config.folder / "wandb").glob("offline-run-*"))
    assert len(folders) == 2, "one for each time that it went on"
    name = (config.folder / "wandb-id").read_text()
    assert all(folder.name.endswith(name) for folder in folders), "and the same run"
    written = b"".join(file.read_bytes() for folder in folders for file in folder.glob("*.wandb"))
    assert b"grad_norm" in written and b"memory_peak_bytes" in written
