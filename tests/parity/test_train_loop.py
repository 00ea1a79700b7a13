"""The training loop on a real corpus: exact resume, signals, kills, divergence, and a run's files."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from colonnade.checkpoint import atomic_folder as folders
from colonnade.checkpoint import native
from colonnade.config import DataConfig, ModelConfig, Plan, RunConfig, TrainConfig
from colonnade.data import Corpus, Manifest, build
from colonnade.errors import CheckpointError, ConfigError, DataError, PlanError
from colonnade.parallel.axis import world_axis
from colonnade.train import Trainer
from colonnade.train.loop import StopSignal, train
from colonnade.train.metrics import Diverged
from tests import corpora
from tests.corpora import tensors
from tests.worlds import run as in_world

MODEL = ModelConfig(vocab_size=300, layers=2, width=16, heads=4, kv_heads=2, ffn_width=24, context=32, tied=True)
TRAIN = TrainConfig(
    steps=12,
    batch=4,
    micro_batch=1,
    lr=1e-2,
    min_lr=1e-3,
    warmup=2,
    log_every=3,
    eval_every=6,
    eval_samples=3,
    save_every=4,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpora.small(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> RunConfig:
    data = DataConfig(path=corpus, sequence=16)
    return RunConfig(name="it", runs=tmp_path, device="cpu", model=MODEL, data=data, train=TRAIN)


def wait_for(condition: Callable[[], bool], seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.01)


@pytest.mark.slow
def test_run_writes_metrics_checkpoints_and_config(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    recorded: list[tuple[int, set[str]]] = []

    class RecordingTracker:
        def __init__(self, folder: Path, resumed_step: int):
            assert (folder, resumed_step) == (config.folder, 0)

        def record(self, step: int, values: Mapping[str, float]) -> None:
            recorded.append((step, set(values)))

        def close(self) -> None:
            recorded.append((-1, set()))

    summary = Trainer(config, trackers=[RecordingTracker]).fit()
    assert (summary.steps, summary.stopped) == (12, None)
    assert recorded[0] == (1, {"loss", "grad_norm", "lr", "data_s", "memory_peak_bytes"})
    assert recorded[-2:] == [(12, {"validation_loss"}), (-1, set())]
    assert summary.checkpoint == config.folder / "step-12" == native.newest(config.folder)
    assert [step for step, _ in folders.list_steps(config.folder)] == [12, 8, 4]
    rows = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    held_out = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert list(losses) == list(range(1, 13))
    assert list(held_out) == [6, 12]
    assert losses[12] == summary.loss < losses[1] - 0.1
    assert held_out[12] == summary.validation_loss
    assert all(row["tokens_per_s"] > 0 for row in rows if row["step"] % 3 == 0 and "loss" in row)
    assert summary.picture is not None and summary.picture.read_bytes()[:4] == b"\x89PNG"
    board = EventAccumulator(str(config.folder / "tensorboard")).Reload()
    assert [point.step for point in board.Scalars("loss")] == list(range(1, 13))
    meta = native.read_meta(summary.checkpoint)
    assert meta.run == config.resolved("cpu"), "including settings resolved for the device"
    assert meta.cursor["seen"] == 12 * 4
    assert (summary.checkpoint / "tokenizer" / "tokenizer.json").is_file()
    text = capsys.readouterr().out
    assert "mfu n/a" in text and "step 12/12" in text and "\x1b" not in text
    again = Trainer(config).fit()
    assert (again.steps, again.loss, again.checkpoint) == (12, None, summary.checkpoint)


def test_signal_saves_and_the_resumed_run_is_the_same(config: RunConfig) -> None:
    whole = config.replace(name="whole")
    Trainer(whole).fit()
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    taken: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):

        def interrupt(number: int = number) -> None:
            before = len((config.folder / "metrics.jsonl").read_text()) if taken else 0
            metrics = config.folder / "metrics.jsonl"
            wait_for(lambda: metrics.exists() and len(metrics.read_text()) > before)
            os.kill(os.getpid(), number)

        thread = threading.Thread(target=interrupt)
        thread.start()
        summary = Trainer(config).fit()
        thread.join()
        if summary.stopped is not None:
            assert summary.stopped == number.name
            assert summary.checkpoint == config.folder / f"step-{summary.steps}"
        taken.append(summary.steps)
    assert 0 < taken[0] < 12, "the first signal came too late to test anything"
    assert Trainer(config).fit().steps == 12
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert tensors(config.folder / "step-12") == tensors(whole.folder / "step-12")
    one, other = ((it.folder / "metrics.jsonl").read_text().splitlines() for it in (config, whole))
    losses = [[json.loads(row)["loss"] for row in rows if '"loss"' in row] for rows in (one, other)]
    assert losses[0] == losses[1] and len(losses[0]) == 12


def _stop_requests() -> list[str]:
    """Results of five stop checks; in between, rank 1 gets SIGTERM once and rank 0 nothing."""
    found: list[str] = []
    with StopSignal(world_axis()) as stop:
        for step in range(5):
            if step == 3 and torch.distributed.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            found.append(str(stop.received()))
    return found


def test_signal_to_one_rank_stops_all_after_the_same_step() -> None:
    one, other = in_world(2, _stop_requests)
    assert one == other == ["None"] * 3 + ["stopped by SIGTERM"] * 2


SCRIPT = """
import sys
from colonnade.config import RunConfig
from colonnade.train import Trainer
if __name__ == "__main__":
    summary = Trainer(RunConfig.model_validate_json(sys.argv[1])).fit()
    print("ended", summary.steps, summary.stopped, flush=True)
"""


@pytest.mark.slow
def test_two_ranks_resume_after_sigkill_and_sigterm(config: RunConfig, tmp_path: Path) -> None:
    """SIGKILL for the whole group, then SIGTERM for the launcher, then resumed: bitwise the uninterrupted run."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    slow = config.train.replace(steps=60, save_every=3, eval_every=0, log_every=3)
    config = config.replace(plan=Plan(tp=2), train=slow)

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(script), config.model_dump_json()],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            cwd=Path(__file__).parents[2], env={**os.environ, "PYTHONPATH": "."},
        )  # fmt: skip

    def newest_step() -> int:
        return folders.list_steps(config.folder)[0][0] if folders.list_steps(config.folder) else 0

    killed = start()
    wait_for(lambda: newest_step() >= 3)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    first = newest_step()
    assert native.newest(config.folder) == config.folder / f"step-{first}"
    stopped = start()
    wait_for(lambda: newest_step() > first)
    stopped.terminate()
    output, _ = stopped.communicate(timeout=100)
    second = newest_step()
    assert f"resumed {config.folder}/step-{first}" in output
    assert f"ended {second} SIGTERM" in output and stopped.returncode == 0
    for name in (config.name, "whole"):
        in_world(2, train, config.replace(name=name, train=slow.replace(save_every=0)))
    assert tensors(config.folder / "step-60") == tensors(config.runs / "whole" / "step-60")


def test_divergence_error_names_step_and_last_good_checkpoint(config: RunConfig) -> None:
    Trainer(config.replace(train=TRAIN.replace(steps=4, eval_every=0))).fit()
    good = config.folder / "step-4"
    weights = load_file(good / "weights-00000.safetensors")
    weights["norm.weight"][0] = float("nan")
    save_file(weights, good / "weights-00000.safetensors")
    manifest = json.loads((good / "manifest.json").read_text())
    manifest["files"]["weights-00000.safetensors"] = folders.digest_of(good / "weights-00000.safetensors").model_dump()
    (good / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        Diverged, match=r"step 5: the loss is nan on data rank 0 of 1; the last good checkpoint is .*step-4"
    ):
        Trainer(config).fit()
    assert native.newest(config.folder) == good, "no checkpoint was saved after it"


@pytest.mark.slow
def test_newest_checkpoint_with_a_missing_file_is_an_error(config: RunConfig) -> None:
    Trainer(config).fit()
    (config.folder / ".step-13.partial").mkdir()
    missing = config.folder / "step-12" / "exp_avg-00000.safetensors"
    missing.unlink()
    with pytest.raises(CheckpointError, match="is missing") as caught:
        Trainer(config).fit()
    assert str(missing) in str(caught.value)
    assert not (config.folder / ".step-13.partial").exists()
    shutil.rmtree(missing.parent)
    assert Trainer(config).fit().steps == 12


def test_inconsistent_runs_are_refused(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocabulary of 300 tokens, the model of 50; set --model.vocab_size 300"):
        Trainer(config.replace(model=MODEL.replace(vocab_size=50))).fit()
    assert not config.folder.exists()
    with pytest.raises(ConfigError, match="timeout_s is inf: input should be less than"):
        TRAIN.replace(timeout_s=float("inf"))
    with pytest.raises(ConfigError, match="name is ''"):
        config.replace(name="")
    with pytest.raises(ConfigError, match=r"name '\.\./other' is outside the folder of runs"):
        config.replace(name="../other")
    with pytest.raises(DataError):
        Trainer(config.replace(data=DataConfig(path=tmp_path / "nowhere", sequence=16))).fit()
    short = config.replace(train=TRAIN.replace(steps=4, eval_every=0))
    Trainer(short).fit()
    with pytest.raises(CheckpointError, match=r"of another model \(model.ffn_width: 24 -> 32\); resume with"):
        Trainer(short.replace(model=MODEL.replace(ffn_width=32))).fit()
    other = tmp_path / "other"
    words = corpora.TEXT.split()
    build([(str(i), " ".join(words[: 5 + i % 7])) for i in range(90)], other, vocab_size=300, validation_share=0.2)
    with pytest.raises(
        DataError, match=r"is not the data that .* was trained on: it has a different tokenizer; use that"
    ):
        Trainer(short.replace(data=DataConfig(path=other, sequence=16))).fit()
    with pytest.raises(ConfigError, match=r"data.seed is 7, but .* trained with 0: .* set --data.seed 0, restart the"):
        Trainer(short.replace(data=short.data.replace(seed=7))).fit()
    with pytest.raises(ConfigError, match=r"data.sequence is 8, but .* trained with 16"):
        Trainer(short.replace(data=short.data.replace(sequence=8))).fit()


@pytest.mark.slow
def test_resume_checks_the_corpus(config: RunConfig, corpus: Path, tmp_path: Path) -> None:
    """The same documents in another order have equal counts of tokens and documents, but are other samples."""
    split, tokenizer = Corpus(corpus).split("train"), Corpus(corpus).tokenizer
    documents = [("", tokenizer.decode(split.document(i).tolist())) for i in range(split.documents)]
    for name, texts in (("forth", documents), ("back", documents[::-1])):
        build(texts, tmp_path / name, tokenizer=tokenizer, validation_share=0.2)
    manifests = [Manifest.load(tmp_path / name) for name in ("forth", "back")]
    assert manifests[0].train.tokens == manifests[1].train.tokens and manifests[0] != manifests[1]

    def fit(name: str, steps: int, **data) -> int:
        data = DataConfig(path=tmp_path / name, sequence=16, **data)
        Trainer(config.replace(data=data, train=TRAIN.replace(steps=steps, eval_every=0))).fit()
        return native.read_meta(config.folder / f"step-{steps}").cursor["seen"] // TRAIN.batch

    assert fit("forth", 4) == 4
    shutil.copytree(tmp_path / "forth", tmp_path / "copy")
    assert fit("copy", 5) == 5, "another path is not another corpus"
    refused = r"back is not the data that .*step-5 was trained on: shard 0 of 1 .* order; .* --data.restart"
    with pytest.raises(DataError, match=refused):
        fit("back", 6)
    assert fit("back", 6, restart=True) == 1, "the data restarts"
    assert fit("back", 8, restart=True) == 3, "and continues if the corpus is the checkpoint's"
    assert fit("back", 9, restart=True, seed=4) == 1


def _fit_with(by_rank: list[RunConfig]) -> str:
    try:
        train(by_rank[world_axis().rank])
    except PlanError as error:
        return str(error)
    return "trained"


def test_ranks_with_different_corpora_are_refused(config: RunConfig, corpus: Path, tmp_path: Path) -> None:
    corpora.small(tmp_path / "other", corpora.TEXT.upper())
    one = config.replace(plan=Plan(dp=2), train=TRAIN.replace(steps=4, eval_every=0))
    other = one.replace(data=DataConfig(path=tmp_path / "other", sequence=16))
    (output,) = set(in_world(2, _fit_with, [one, other]))
    assert re.search(r"rank 1 has corpus [0-9a-f]{12} instead of [0-9a-f]{12};", output), output


@pytest.mark.slow
def test_bfloat16_and_deterministic_runs_learn(config: RunConfig) -> None:
    for name, changes in (("bf16", {"dtype": "bfloat16"}), ("deterministic", {"deterministic": True})):
        summary = Trainer(config.replace(name=name, train=TRAIN.replace(**changes))).fit()
        assert summary.loss is not None and summary.loss < 5.6
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler emits its own warnings
def test_compiled_blocks_train_the_same(config: RunConfig) -> None:
    losses = []
    for compile_blocks in (False, True):
        t = TRAIN.replace(steps=2, eval_every=0, micro_batch=4, compile=compile_blocks)
        data = config.data.replace(separate_documents=False)
        losses.append(Trainer(config.replace(name=str(compile_blocks), train=t, data=data)).fit().loss)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
