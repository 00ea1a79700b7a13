"""Encoder–decoders in training: any layout computes the same, runs learn and resume, bad layouts are refused."""

import json
from pathlib import Path

import pytest

from colonnade.config import DataConfig, ModelConfig, Plan, RunConfig, TrainConfig
from colonnade.data import Corpus, build
from colonnade.errors import ConfigError, PlanError
from colonnade.train.loop import train
from colonnade.verify import all_plans, shrink
from tests.encdec import nllb, switch, t5
from tests.parity import layout_faults as faults
from tests.parity.test_verify import compared
from tests.worlds import run as in_world

MODEL, SPARSE, NLLB = shrink(t5("1.0"), 2), shrink(switch(), 2), shrink(nllb(), 2)
PLANS = [Plan(tp=2, sequence_parallel=True), Plan(dp=2)]
MORE = [Plan(tp=2), Plan(dp=2, reshard=False), Plan(replicate=2)]
EXPERTS = [Plan(tp=2, sequence_parallel=True, ep=2), Plan(dp=2, etp=2, adaptive_r=2)]
MORE_EXPERTS = [Plan(dp=2), Plan(dp=2, ep=2, overlap=2), Plan(tp=2, ep=2), Plan(replicate=2, ep=2, adaptive_r=0)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "plans"),
    [
        (MODEL, PLANS),
        (SPARSE, EXPERTS),
        (NLLB, EXPERTS[:1]),
        pytest.param(MODEL, MORE, marks=pytest.mark.long),
        pytest.param(SPARSE, MORE_EXPERTS, marks=pytest.mark.long),
        pytest.param(NLLB, MORE_EXPERTS, marks=pytest.mark.long),
    ],
    ids=["t5", "switch", "nllb", "t5-more", "switch-more", "nllb-more"],
)
def test_plans_of_two_equal_one_process(tmp_path: Path, model: ModelConfig, plans: list[Plan]) -> None:
    for results in in_world(2, compared, model, plans, tmp_path, None):
        for result in results:
            assert result.ok, (str(result.plan), result.errors, result.where)


@pytest.mark.long
def test_plans_of_four_equal_one_process(tmp_path: Path) -> None:
    model = shrink(t5("1.1"), 2)
    plans = [Plan(tp=4, sequence_parallel=True), Plan(tp=2, dp=2, sequence_parallel=True)]
    for results in in_world(4, compared, model, plans, tmp_path, None):
        for result in results:
            assert result.ok, (str(result.plan), result.errors, result.where)


@pytest.mark.slow
def test_a_missing_sum_is_found(tmp_path: Path) -> None:
    """The check can fail: norms of the encoder without their sum over tp."""
    plan = Plan(tp=2, sequence_parallel=True)
    for (result,) in in_world(2, compared, MODEL, [plan], tmp_path, faults.partial_gradients_not_summed):
        assert result.errors["gradients"] > 1e-6


@pytest.mark.parametrize("plan", [Plan(cp=2), Plan(pp=2), Plan(tp=2, sequence_parallel=True, tp_overlap=True)])
def test_layouts_that_are_not_proven_are_refused(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"(cp|pp|tp_overlap) has not been verified for a model with an encoder"):
        plan.check(MODEL)
    assert plan not in all_plans(plan.world, MODEL)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose target is the source backwards."""
    folder = tmp_path_factory.mktemp("data")
    words = ["the", "column", "stands", "in", "a", "row", "and", "bears", "its", "share", "of", "weight"]
    lines = [[words[(3 * i + j * j) % len(words)] for j in range(2 + i % 5)] for i in range(150)]
    (folder / "pairs.tsv").write_text("\n".join(f"{' '.join(x)}\t{' '.join(x[::-1])}" for x in lines))
    build([folder / "pairs.tsv"], folder / "corpus", objective="pairs", vocab_size=300, validation_share=0.1)
    return folder / "corpus"


def config(corpus: Path, runs: Path, **changes: object) -> RunConfig:
    size = Corpus(corpus).manifest.vocab_size
    return RunConfig(
        name="it",
        runs=runs,
        device="cpu",
        model=switch(vocab_size=size),
        data=DataConfig(path=corpus, sequence=32),
        train=TrainConfig(
            steps=6, batch=8, micro_batch=8, lr=3e-3, warmup=2, dtype="float64", eval_every=3, eval_samples=5,
            save_every=3, log_every=1, dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1,
        ),
    ).replace(**changes)  # fmt: skip


def losses(run: RunConfig) -> list[float]:
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "validation_loss", "moe/balance", "moe/dropped")
    assert all("moe/3/balance" in row for row in rows if "loss" in row), "the encoder's block 1 is number 3"
    return [row[key] for row in rows for key in names if key in row]


def train_under(run: RunConfig) -> None:
    """In a worker."""
    train(run)


@pytest.mark.slow
def test_training_learns_and_plans_agree(corpus: Path, tmp_path: Path) -> None:
    alone = config(corpus, tmp_path / "one")
    train(alone)
    found = losses(alone)
    assert found[-3] < found[0]
    other = config(corpus, tmp_path / "two", plan=Plan(dp=2, ep=2))
    # The load is balanced over the micro-batches that run at the same time.
    other = other.replace(train=other.train.replace(micro_batch=4))
    in_world(2, train_under, other)
    assert losses(other) == pytest.approx(found, rel=1e-9)


def test_the_corpus_must_fit_the_model(corpus: Path, tmp_path: Path) -> None:
    run = config(corpus, tmp_path)
    with pytest.raises(ConfigError, match="has source–target pairs, but this model has no encoder"):
        train(run.replace(model=run.model.replace(encoder=None, family="llama", relative_positions=None)))
    texts = [(str(i), f"plain text {i} of some words") for i in range(40)]
    build(texts, tmp_path / "text", vocab_size=300)
    run = run.replace(model=run.model.replace(vocab_size=300))
    with pytest.raises(ConfigError, match="has plain text, but an encoder–decoder trains on pairs or corrupted"):
        train(run.replace(data=run.data.replace(path=tmp_path / "text")))
