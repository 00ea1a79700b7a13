"""Full runs in float16 and float8, with recomputation and offloaded moments: resumed, logged, refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from colonnade.checkpoint import atomic_folder as folders
from colonnade.checkpoint import native
from colonnade.config import DataConfig, ModelConfig, Plan, RunConfig, TrainConfig
from colonnade.errors import CapacityError, ConfigError, PlanError
from colonnade.parallel.pipeline import schedule_supported
from colonnade.train import Trainer
from colonnade.train.loop import train
from colonnade.train.metrics import Diverged
from tests import corpora
from tests.corpora import tensors
from tests.worlds import run as in_world

TEXT = "we the people of this union hold that a column stands in a row and bears its share"
MODEL = ModelConfig(vocab_size=300, layers=3, width=16, heads=4, kv_heads=2, ffn_width=32, context=32, tied=True)
TRAIN = TrainConfig(
    steps=12, batch=4, micro_batch=2, lr=1e-2, min_lr=1e-3, warmup=2, log_every=4, eval_every=0, save_every=4
)
SPLIT = Plan(pp=2, schedule="zero_bubble")
HALF = {"dtype": "float16", "loss_scale": 2.0**26, "loss_scale_steps": 3}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpora.small(tmp_path_factory.mktemp("data") / "corpus", TEXT)


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> RunConfig:
    data = DataConfig(path=corpus, sequence=16)
    return RunConfig(name="it", runs=tmp_path, device="cpu", model=MODEL, data=data, train=TRAIN)


def rows(run: RunConfig) -> list[dict[str, float]]:
    columns = ("step", "loss", "grad_norm", "lr", "loss_scale", "skipped")
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in columns if key in row} for row in lines]


@pytest.mark.slow
def test_float16_recovers_from_overflows_and_resumes_exactly(config: RunConfig, capsys) -> None:
    whole = config.replace(name="whole", train=TRAIN.replace(**HALF))
    summary = Trainer(whole).fit()
    assert summary.loss is not None and summary.picture is not None
    logged = rows(whole)
    skipped = [row for row in logged if "grad_norm" not in row]
    assert 4 < len(skipped) < 12, "overflows before and after the first checkpoint"
    assert logged[-1]["skipped"] == len(skipped) and logged[0]["loss_scale"] == HALF["loss_scale"]
    assert "scale 2^" in capsys.readouterr().out
    first, last = (native.read_meta(whole.folder / f"step-{n}") for n in (4, 12))
    assert first.updates == 0 and last.updates == 12 - len(skipped) and last.loss_scale is not None

    part = config.replace(train=TRAIN.replace(**HALF))
    part.folder.mkdir()
    for step in (4, 8):  # one resume is between overflows, one after them
        shutil.copytree(whole.folder / f"step-{step}", part.folder / f"step-{step}")
        Trainer(part).fit()
        assert tensors(part.folder / "step-12") == tensors(whole.folder / "step-12")
        assert rows(part) == logged[step:]
        resumed = native.read_meta(part.folder / "step-12")
        assert (resumed.loss_scale, resumed.updates) == (last.loss_scale, last.updates)
        shutil.rmtree(part.folder)
        part.folder.mkdir()


def test_float16_run_resumes_in_another_dtype(config: RunConfig) -> None:
    Trainer(config.replace(train=TRAIN.replace(steps=4, **HALF))).fit()
    for steps, dtype in ((8, "bfloat16"), (12, "float16")):
        Trainer(config.replace(train=TRAIN.replace(steps=steps, dtype=dtype))).fit()
        meta = native.read_meta(config.folder / f"step-{steps}")
        assert meta.updates == steps - 4 and (meta.loss_scale is None) == (dtype == "bfloat16")


def test_ever_decreasing_loss_scale_is_a_divergence(config: RunConfig) -> None:
    short = TRAIN.replace(steps=4, dtype="float16", loss_scale=8.0)
    Trainer(config.replace(train=short)).fit()
    good = config.folder / "step-4"
    weights = load_file(good / "weights-00000.safetensors")
    weights["norm.weight"][0] = float("nan")
    save_file(weights, good / "weights-00000.safetensors")
    manifest = json.loads((good / "manifest.json").read_text())
    manifest["files"]["weights-00000.safetensors"] = folders.digest_of(good / "weights-00000.safetensors").model_dump()
    (good / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        Diverged, match=r"step 8: .* nan.* loss scale fell to 1 after 4 skipped steps; no scale avoids the overflow"
    ):
        Trainer(config.replace(train=short.replace(steps=12))).fit()


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(dp=2), Plan(pp=2), Plan(cp=2)], ids=str)
def test_ranks_skip_the_same_steps_and_resume_exactly(config: RunConfig, plan: Plan) -> None:
    whole = config.replace(name="whole", plan=plan, train=TRAIN.replace(**HALF))
    in_world(2, train, whole)
    one = config.replace(name="one", train=TRAIN.replace(**HALF))
    Trainer(one).fit()
    found, expected = rows(whole), rows(one)
    # A rank's partial sum over tokens may fit into float16 where the full sum overflows.
    apart = [abs(row["skipped"] - other["skipped"]) for row, other in zip(found, expected, strict=True)]
    assert max(apart) <= 1
    alike = apart.index(1) if 1 in apart else len(apart)
    assert alike >= 6
    losses, wanted = ([row["loss"] for row in side[:alike]] for side in (found, expected))
    assert losses == pytest.approx(wanted, abs=0.05)
    part = config.replace(plan=plan, train=TRAIN.replace(**HALF))
    part.folder.mkdir()
    shutil.copytree(whole.folder / "step-4", part.folder / "step-4")
    in_world(2, train, part)
    assert tensors(part.folder / "step-12") == tensors(whole.folder / "step-12")


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(), Plan(tp=2), Plan(dp=2), Plan(pp=2), Plan(cp=2)], ids=str)
def test_recomputation_and_offload_are_bitwise_neutral(config: RunConfig, plan: Plan) -> None:
    """A run resumes from a checkpoint of another kind of run, too."""
    settings = {
        "plain": {},
        "full": {"recompute": "full"},
        "attention": {"recompute": "attention"},
        "budget": {"recompute": "budget", "activation_bytes": 40_000, "offload": "optimizer"},
    }
    short = TRAIN.replace(steps=6, save_every=3)
    plain = config.replace(name="plain", plan=plan)
    for name, changes in settings.items():
        in_world(plan.world, train, config.replace(name=name, plan=plan, train=short.replace(**changes)))
        assert tensors(config.runs / name / "step-6") == tensors(plain.folder / "step-6"), name
    crossed = config.replace(name="crossed", plan=plan, train=short.replace(offload="optimizer"))
    crossed.folder.mkdir()
    shutil.copytree(plain.folder / "step-3", crossed.folder / "step-3")
    in_world(plan.world, train, crossed)
    assert tensors(crossed.folder / "step-6") == tensors(plain.folder / "step-6")


@pytest.mark.slow
@pytest.mark.skipif(
    not schedule_supported(SPLIT), reason="torch before 2.13 computes separate weight gradients wrongly"
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_schedule_accumulates_gradients_in_float32(config: RunConfig, dtype: str) -> None:
    """A schedule that accumulates in a low precision would round sixteen times over sixteen micro-batches."""
    many = TRAIN.replace(steps=2, batch=16, micro_batch=1, dtype=dtype, save_every=0, loss_scale=16.0)
    runs = [config.replace(name=plan.schedule, plan=plan, train=many) for plan in (Plan(pp=2), SPLIT)]
    for run in runs:
        in_world(2, train, run)
    assert tensors(runs[0].folder / "step-2") == tensors(runs[1].folder / "step-2")


def test_startup_output_shows_recompute_and_offload(config: RunConfig, capsys) -> None:
    options = {"recompute": "budget", "activation_bytes": 40_000, "offload": "optimizer"}
    Trainer(config.replace(train=TRAIN.replace(steps=2, **options))).fit()
    output = capsys.readouterr().out
    assert "offload optimizer" in output
    assert "recompute in 3 blocks: " in output and "of the 39.06 KiB allowed for a micro-batch" in output
    with pytest.raises(
        CapacityError, match=r"3 blocks save .* train.activation_bytes allows 100 bytes; set it to at l"
    ):
        Trainer(config.replace(name="little", train=TRAIN.replace(recompute="budget", activation_bytes=100))).fit()


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_float8_runs_learn(config: RunConfig, scaling: str) -> None:
    t = TRAIN.replace(dtype="bfloat16", float8=scaling, recompute="full", micro_batch=3, batch=3)
    summary = Trainer(config.replace(train=t)).fit()
    losses = [row["loss"] for row in rows(config)]
    assert summary.loss is not None and losses[-1] < losses[0] - 0.2
    plain = config.replace(name="plain", train=t.replace(float8="none"))
    Trainer(plain).fit()
    assert losses != (reference := [row["loss"] for row in rows(plain)])
    assert torch.tensor(losses).sub(torch.tensor(reference)).abs().max() < 0.05


def test_unsupported_float8_settings_are_refused_before_the_start(config: RunConfig) -> None:
    eight = TRAIN.replace(dtype="bfloat16", float8="rowwise")
    with pytest.raises(ConfigError, match=r"multiples of 16, and the model has ffn_width 40; change it, or set"):
        config.replace(model=MODEL.replace(ffn_width=40), train=eight)
    with pytest.raises(PlanError, match=r"tp=2 leaves each rank 8 of columns of heads 16; use a lower tp"):
        config.replace(plan=Plan(tp=2), train=eight)
    wide = MODEL.replace(width=32, ffn_width=48)
    with pytest.raises(PlanError, match=r"tp=2 leaves each rank 24 of ffn_width 48"):
        config.replace(model=wide, plan=Plan(tp=2), train=eight)
    assert config.replace(model=wide.replace(ffn_width=64), plan=Plan(tp=2), train=eight).train.float8 == "rowwise"
    with pytest.raises(ConfigError, match=r"float8 rowwise needs bfloat16, not float32"):
        TrainConfig(float8="rowwise", dtype="float32")
    with pytest.raises(ConfigError, match=r"a budget needs bytes, and bytes need recompute budget"):
        TrainConfig(recompute="budget")
    with pytest.raises(ConfigError, match=r"a budget needs bytes, and bytes need recompute budget"):
        TrainConfig(activation_bytes=5)
