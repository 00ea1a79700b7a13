"""``train.freeze`` name patterns: under any plan, and resumed, the rest trains as in one process."""

import shutil
from pathlib import Path

import pytest
import torch

import colonnade
from colonnade.checkpoint import native
from colonnade.checkpoint.dcp_storage import Index
from colonnade.config import DataConfig, ModelConfig, MoeConfig, Plan, RunConfig, TrainConfig
from colonnade.data import Corpus
from colonnade.errors import ConfigError
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train import Trainer
from colonnade.train.initial_weights import frozen_names
from colonnade.train.loop import train
from colonnade.train.trackers import read_rows
from colonnade.train.training_state import TrainingState
from tests.corpora import small
from tests.worlds import run as in_world

MOE = MoeConfig(experts=4, active=2, ffn_width=12, first_k_dense_replace=1, balance_weight=0.1, bias_rate=0.01)
LOWER = ("embed", "blocks.[01]")
"""The first of two pipeline ranks has nothing to train."""
SOME = ("embed.tokens.weight", "blocks.2", "*.norm1.weight", r"re:.*\.(qkv|out)\.weight", "*.router")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("data") / "corpus")


def config(corpus: Path, runs: Path, *freeze: str, **train: object) -> RunConfig:
    model = ModelConfig(
        vocab_size=Corpus(corpus).manifest.vocab_size, layers=4, width=16, heads=4, ffn_width=20, context=32, moe=MOE,
        tied=True,
    )  # fmt: skip
    settings = TrainConfig(
        steps=4, batch=4, micro_batch=4, lr=1e-2, min_lr=1e-3, warmup=1, dtype="float64", eval_every=0, save_every=2,
        clip=0.1, freeze=freeze,
    )  # fmt: skip
    data = DataConfig(path=corpus, sequence=16)
    return RunConfig(name="it", runs=runs, device="cpu", model=model, data=data, train=settings.replace(**train))


def _weights(run: RunConfig) -> dict[str, torch.Tensor]:
    return colonnade.load(run.folder, device="cpu", dtype="float64").transformer.state_dict()


def _history(run: RunConfig) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in read_rows(run.folder) if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("freeze", "plan", "options"),
    [
        (SOME, Plan(tp=2, dp=2, ep=2, sequence_parallel=True), {}),
        (SOME, Plan(pp=2, replicate=2, etp=2), {"skip_bad_batches": 1}),
        (LOWER, Plan(dp=2, ep=2), {}),
        (LOWER, Plan(pp=2, schedule="gpipe"), {"offload": "optimizer"}),
        (LOWER, Plan(pp=2, dp=2), {"fused_adamw": True}),
        (LOWER, Plan(pp=2, stages=2, schedule="interleaved"), {}),
        (LOWER, Plan(pp=2, stages=2, schedule="zero_bubble"), {}),
    ],
    ids=str,
)
def test_freezing_is_the_same_under_any_plan(
    freeze: tuple[str, ...], plan: Plan, options: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    """Stopped after two of four steps and resumed, compared with one uninterrupted process."""
    micro = 1 if plan.pp > 1 else 4 // plan.data_ranks
    alone = config(corpus, tmp_path / "alone", *freeze, micro_batch=micro * plan.data_ranks, **options)
    Trainer(alone).fit()
    several = alone.replace(runs=tmp_path / "several", plan=plan, train=alone.train.replace(micro_batch=micro))
    in_world(plan.world, train, several)
    shutil.rmtree(several.folder / "step-4")
    in_world(plan.world, train, several)
    assert len(_history(alone)) == 4
    for found, expected in zip(_history(several), _history(alone), strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
    start = initialise(Transformer(alone.model, dtype=torch.float64), alone.train.seed).state_dict()
    frozen, mine, theirs = frozen_names(alone.model, freeze), _weights(several), _weights(alone)
    for name, was in start.items():
        assert torch.equal(mine[name], was) == (name in frozen), name
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-9, atol=1e-9)
    meta, saved = native.read_meta(several.folder / "step-4"), Index.read(several.folder / "step-4").tensors
    assert meta.updates == 4
    moments = {key.partition("/")[2] for key in saved if not key.startswith("weights/")}
    assert moments == {name for name in start if not name.endswith("bias_E")} - frozen


def test_frozen_parameters_have_no_gradients_or_moments(corpus: Path, tmp_path: Path) -> None:
    run = config(corpus, tmp_path, *LOWER)
    with DistributedContext.build(run.plan, "cpu") as context, TrainingState(run, context) as training:
        requested = []
        for name, parameter in training.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad, name=name: requested.append(name))
        batches = training.feed.samples.at(0)
        outcome = training._step(0, batches)
        names = {name for name, _ in training.model.named_parameters()}
        frozen = frozen_names(run.model, LOWER) & names
        assert frozen and set(requested) == names - frozen == set(training.masters.local)
        assert {key.partition("/")[2] for key in training.optimizer.state} == names - frozen
        assert float(outcome.norm) > 0


def test_unmatched_pattern_is_refused_with_the_nearest_names(corpus: Path, tmp_path: Path) -> None:
    for pattern, said in (
        ("block.0", r"train.freeze 'block.0' matches no parameter; the closest are blocks.0, "),
        ("blocks.0.atention", r"the closest are blocks.0.attention, "),
        ("re:embed", r"'re:embed' matches no parameter; the closest are embed, "),
        ("re:(", r"'re:\(' is not a valid regular expression: missing \)"),
        ("*", r"train.freeze norm \* leaves no parameter to train"),
    ):
        with pytest.raises(ConfigError, match=said):
            Trainer(config(corpus, tmp_path, "norm", pattern))
    dense = config(corpus, tmp_path, "experts")
    with pytest.raises(ConfigError, match=r"train\.freeze experts applies to experts, and this model has none"):
        Trainer(dense.replace(model=dense.model.replace(moe=None)))


def test_single_pattern_is_read_as_a_list() -> None:
    assert TrainConfig(freeze="none").freeze == TrainConfig().freeze == ()  # type: ignore[arg-type]
    assert TrainConfig(freeze="experts").freeze == ("experts",)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="freeze"):
        TrainConfig(freeze=3)  # type: ignore[arg-type]
