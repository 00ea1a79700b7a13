"""A run that starts from existing weights: any format, any plan, unfreezing, and refused mismatches."""

from pathlib import Path

import pytest

import colonnade
from colonnade.cli import main
from colonnade.config import DataConfig, ModelConfig, MoeConfig, Plan, RunConfig, TrainConfig
from colonnade.data import build
from colonnade.errors import CheckpointError, ConfigError
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train import Trainer
from colonnade.train.training_state import TrainingState
from tests.corpora import TEXT
from tests.worlds import run as in_world

MOE = MoeConfig(experts=4, active=2, ffn_width=12)
MODEL = ModelConfig(
    family="mixtral", vocab_size=300, layers=2, width=16, heads=4, kv_heads=2, ffn_width=12, context=32, moe=MOE
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "corpus"
    build([(f"doc{i}", f"{i} {TEXT}") for i in range(30)], out, vocab_size=300, validation_share=0.2)
    return out


def config(corpus: Path, runs: Path, name: str, **train: object) -> RunConfig:
    settings = TrainConfig(
        steps=2, batch=8, micro_batch=2, lr=1e-2, min_lr=1e-3, warmup=0, dtype="float64", eval_every=0, save_every=0,
        log_every=1,
    )  # fmt: skip
    data = DataConfig(path=corpus, sequence=16)
    return RunConfig(name=name, runs=runs, device="cpu", model=MODEL, data=data, train=settings.replace(**train))


@pytest.fixture(scope="module")
def finished_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that kept its experts frozen."""
    run = config(corpus, tmp_path_factory.mktemp("runs"), "there", freeze="experts")
    Trainer(run).fit()
    return run.folder


def first_step(run: RunConfig) -> tuple[float, float]:
    """(loss, gradient norm) of the first step of a new run."""
    with DistributedContext.build(run.plan, "cpu") as context, TrainingState(run, context) as training:
        outcome = training.step()
        return float(context.axes.global_sum(outcome.loss_sum) / outcome.count), float(outcome.norm)


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [Plan(tp=2, etp=2), Plan(pp=2), Plan(dp=2, ep=2)], ids=str)
@pytest.mark.parametrize("kind", ["colonnade", "hf"])
def test_any_plan_starts_the_same(corpus: Path, finished_run: Path, tmp_path: Path, plan: Plan, kind: str) -> None:
    checkpoint = finished_run
    if kind == "hf":
        with colonnade.load(finished_run, device="cpu", dtype="float64") as model:
            checkpoint = colonnade.save(model, tmp_path / "hf", format="hf")
    run = config(corpus, tmp_path, "again", pretrained_checkpoint=str(checkpoint))
    loss, norm = first_step(run)
    drawn, _ = first_step(run.replace(train=run.train.replace(pretrained_checkpoint="")))
    assert abs(loss - drawn) > 1e-3
    with_plan = run.replace(plan=plan, train=run.train.replace(micro_batch=2 // plan.data_ranks))
    for theirs, their_norm in in_world(plan.world, first_step, with_plan):
        assert (theirs, their_norm) == (pytest.approx(loss, rel=1e-10), pytest.approx(norm, rel=1e-10))


def test_unfreezing_needs_a_new_run(corpus: Path, finished_run: Path) -> None:
    unfrozen = config(corpus, finished_run.parent, "there", steps=4)
    with pytest.raises(CheckpointError, match=r"no optimizer state .* with the same train\.freeze, or start"):
        Trainer(unfrozen).fit()
    new_run = config(corpus, finished_run.parent, "thawed", pretrained_checkpoint=str(finished_run), freeze="rest")
    Trainer(new_run).fit()
    Trainer(
        new_run.replace(train=new_run.train.replace(steps=3, pretrained_checkpoint="nowhere"))
    ).fit()  # resumed: the start checkpoint is no longer read
    before, after = (
        colonnade.load(folder, device="cpu", dtype="float64").transformer.state_dict()
        for folder in (finished_run, new_run.folder)
    )
    moved = {name for name, x in before.items() if not x.equal(after[name])}
    assert moved == {name for name in before if ".experts." in name}


def test_unsuitable_start_checkpoints_are_refused(corpus: Path, finished_run: Path, tmp_path: Path) -> None:
    run = config(corpus, tmp_path, "other", pretrained_checkpoint=str(finished_run))
    for model, said in (
        (MODEL.replace(norm_eps=1e-3), "norm_eps: 1e-0[56] -> 0.001; to use its model"),
        (
            MODEL.replace(moe=MOE.replace(experts=8)),
            r"'blocks.0.ffn.experts.down': \(4, 12, 16\) -> \(8, .* and 5 more; to use its model",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            Trainer(run.replace(model=model))
    with pytest.raises(CheckpointError, match="nothing-here does not exist"):
        Trainer(config(corpus, tmp_path, "other", pretrained_checkpoint="nothing-here"))
    build([(f"doc{i}", f"{i} {TEXT[::-1]}") for i in range(30)], tmp_path / "words", vocab_size=300)
    with pytest.raises(
        ConfigError, match=r"a different tokenizer from that of train\.pretrained_checkpoint .* --tokenizer"
    ):
        Trainer(config(tmp_path / "words", tmp_path, "other", pretrained_checkpoint=str(finished_run)))
    Trainer(run.replace(model=MODEL.replace(moe=MOE.replace(capacity=2.0, balance_weight=0.1))))


def test_command_line_takes_the_model_from_the_start_checkpoint(
    corpus: Path, finished_run: Path, tmp_path: Path
) -> None:
    arguments = [
        "train",
        "--train.pretrained_checkpoint",
        str(finished_run),
        "--data.path",
        str(corpus),
        "--data.sequence",
        "16",
        "--runs",
    ]
    arguments += [str(tmp_path), "--name", "on", "--train.steps", "1", "--train.batch", "2", "--train.eval_every", "0"]
    main([*arguments, "--device", "cpu", "--model.moe.capacity", "2"])
    trained = colonnade.load(tmp_path / "on", device="cpu").config
    assert trained == MODEL.replace(moe=MOE.replace(capacity=2.0))
