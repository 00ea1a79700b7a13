"""Expert overrides at load time (active experts, capacity, task) equal a model built with those settings."""

from pathlib import Path

import pytest
import torch

import colonnade
from colonnade import api
from colonnade.checkpoint.load_model import open_for_plan
from colonnade.config import DataConfig, ExpertsConfig, ModelConfig, MoeConfig, Plan, RouterConfig, RunConfig
from colonnade.config import TrainConfig as Train
from colonnade.data import Corpus
from colonnade.errors import CheckpointError, ConfigError
from colonnade.model import Rows, Stream, Transformer
from colonnade.model.moe import Routing, TokenGroups
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train import Trainer
from colonnade.train.loop import train
from colonnade.train.trackers import read_rows
from tests.corpora import TEXT, small
from tests.models import build, ragged
from tests.worlds import assert_same, run

CONFIG = ModelConfig(
    family="mixtral", vocab_size=61, layers=2, width=16, heads=4, ffn_width=10, context=64,
    moe=MoeConfig(experts=4, active=2, ffn_width=10, capacity=0.75),
)  # fmt: skip
TOKENS = list(range(1, 30))


def with_overrides(config: ModelConfig, **changes: object) -> ModelConfig:
    assert config.moe is not None
    return config.replace(moe=config.moe.replace(**changes))


def with_tasks(tasks: int = 3) -> ModelConfig:
    return with_overrides(CONFIG, router=RouterConfig(kind="task", tasks=tasks), capacity=None)


def saved(saved_folder: Path, config: ModelConfig = CONFIG, format: api.Format = "colonnade") -> Transformer:
    """Save a model whose weights affect the output; returns it."""
    model = build(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p * 10 if p.dim() > 1 else p)
    colonnade.save(
        api.Model(model, None, DistributedContext.solo(torch.device("cpu")), "it"), saved_folder, format=format
    )
    return model


def logits(model: Transformer, config: ModelConfig) -> torch.Tensor:
    """Logits of the same weights in a model built from ``config``."""
    other = Transformer(config, dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    return api.Model(other, None, DistributedContext.solo(torch.device("cpu")), "it").logits(TOKENS)


def load(saved_folder: Path, experts: ExpertsConfig, **options: object) -> api.Model:
    return colonnade.load(saved_folder, dtype="float64", device="cpu", experts=experts, **options)  # type: ignore[arg-type]


CHANGES = [
    (ExpertsConfig(active=1), {"active": 1}),
    (ExpertsConfig(active=4, capacity=2.0), {"active": 4, "capacity": 2.0}),
    (ExpertsConfig(capacity="off"), {"capacity": None}),
    (ExpertsConfig(capacity=0), {"capacity": 0}),
]


@pytest.mark.parametrize("format", ["colonnade", "hf"])
@pytest.mark.parametrize(("experts", "changes"), CHANGES, ids=str)
def test_loaded_overrides_equal_a_model_built_with_them(
    experts: ExpertsConfig, changes: dict, format: api.Format, tmp_path: Path
) -> None:
    config = (
        with_overrides(CONFIG, capacity=None, router=RouterConfig(), balance="choices") if format == "hf" else CONFIG
    )
    model = saved(tmp_path / "it", config, format)
    with load(tmp_path / "it", experts) as loaded:
        got = loaded.logits(TOKENS)
        assert loaded.config.moe is not None
        assert {name: getattr(loaded.config.moe, name) for name in changes} == changes
        assert_same(got, logits(model, with_overrides(config, **changes)))
        if with_overrides(config, **changes) != config and changes.get("capacity") != 0:
            assert (got - logits(model, config)).abs().max() > 1e-6
        if format == "colonnade":
            colonnade.save(loaded, tmp_path / "again")
    if format == "colonnade":
        with load(tmp_path / "again", ExpertsConfig()) as again:
            assert_same(again.logits(TOKENS), got, what="a saved model keeps the overrides")


def _on_ranks(saved_folder: Path, plan: Plan, experts: ExpertsConfig) -> torch.Tensor:
    with DistributedContext.build(plan) as context:
        return colonnade.load(saved_folder, dtype="float64", context=context, experts=experts).logits(TOKENS)


def test_overrides_apply_on_several_ranks(tmp_path: Path) -> None:
    model = saved(tmp_path / "it")
    expected = logits(model, with_overrides(CONFIG, active=3, capacity=2.0))
    for got in run(2, _on_ranks, tmp_path / "it", Plan(tp=2), ExpertsConfig(active=3, capacity=2.0)):
        assert_same(got, expected)


def test_task_override_applies_to_all_tokens(tmp_path: Path) -> None:
    """Equals a stream whose token groups give that task for every token."""
    model = saved(tmp_path / "it", with_tasks())
    stream, attend, targets = ragged(with_tasks())
    units = TokenGroups(torch.full_like(targets, 2), 3)
    with_task = stream._replace(routing=Routing(torch.arange(len(targets)), token_groups=units))
    with torch.no_grad(), load(tmp_path / "it", ExpertsConfig(task=2)) as loaded:
        expected = model(with_task, attend, Rows())
        assert_same(loaded.transformer(Stream(stream.tokens_T, stream.positions_T), attend, Rows()), expected)
        other = load(tmp_path / "it", ExpertsConfig(task=0)).transformer(stream, attend, Rows())
        assert (other - expected).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("config", "experts", "message"),
    [
        (CONFIG, {"active": 5}, "cannot go to 5 of 4 experts; set --experts.active 4 or less"),
        (CONFIG, {"task": 1}, "router 'softmax' has no tasks; remove --experts.task"),
        (with_tasks(), {"task": 3}, "no task 3 among 3; set --experts.task to one of 0 to 2"),
        (with_tasks(), {"task": "web"}, "called 'web': the names of this model's tasks are not stored; set .* 0 to 2"),
        (CONFIG, {"layers_on_device": 3}, "3 is more than the 2 layers of experts .* or set it to 1 or less"),
        (CONFIG.replace(moe=None), {"active": 1, "capacity": 2.0},
         "--experts.active and --experts.capacity would change"),
        (with_overrides(CONFIG, active=1, router=RouterConfig(kind="switch")), {"active": 2},
         "'switch' sends a token to 1 of the experts, not 2; remove --experts.active"),
        (with_overrides(CONFIG, router=RouterConfig(kind="gshard")), {"active": 1},
         "'gshard' sends a token to 2 of the experts, not 1"),
        (with_overrides(CONFIG, router=RouterConfig(groups=4, groups_kept=2)), {"active": 3},
         "of which it may use 2 groups of 1; set --experts.active 2 or less"),
    ],
)  # fmt: skip
def test_bad_overrides_are_refused(config: ModelConfig, experts: dict, message: str, tmp_path: Path) -> None:
    """Before any process starts or any weight is read."""
    saved(tmp_path / "it", config)
    with pytest.raises(ConfigError, match=message):
        open_for_plan(tmp_path / "it", Plan(), ExpertsConfig(**experts))


def test_missing_task_error_names_the_remedy(tmp_path: Path) -> None:
    saved(tmp_path / "it", with_tasks())
    with load(tmp_path / "it", ExpertsConfig()) as loaded, pytest.raises(ConfigError, match=r"set --experts\.task"):
        loaded.logits(TOKENS)


def test_overrides_do_not_loosen_the_model_check_of_checkpoints(tmp_path: Path) -> None:
    """Overrides of a loaded model apply to no other model."""
    saved(tmp_path / "it")
    other = Transformer(with_overrides(CONFIG, active=1), dtype=torch.float64)
    with pytest.raises(CheckpointError, match=r"of another model \(model\.moe\.active: 2 -> 1\); resume with"):
        api.native.load(tmp_path / "it", other, DistributedContext.solo(torch.device("cpu")))


# -- validations of a run ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(), Plan(dp=2, ep=2), Plan(pp=2)], ids=str)
def test_validation_uses_the_eval_overrides(plan: Plan, tmp_path: Path) -> None:
    corpus = small(tmp_path / "corpus", TEXT)
    model = with_overrides(CONFIG.replace(vocab_size=Corpus(corpus).manifest.vocab_size), capacity=0.5)
    setting = Train(
        steps=2, batch=4, micro_batch=4 // plan.world, lr=1e-2, warmup=0, dtype="float64", eval_every=2,
        eval_samples=4, save_every=0,
    )  # fmt: skip
    base = RunConfig(
        name="as", runs=tmp_path, device="cpu", model=model, data=DataConfig(path=corpus, sequence=16), train=setting
    )
    runs = [
        base.replace(plan=plan),
        base.replace(name="otherwise", plan=plan, train=setting.replace(eval_active=3, eval_capacity="off")),
    ]
    for it in runs:
        if plan.world == 1:
            Trainer(it).fit()
        else:
            run(plan.world, train, it)
    rows = [read_rows(it.folder)[-1]["validation_loss"] for it in runs]
    losses = [[row["loss"] for row in read_rows(it.folder) if "loss" in row] for it in runs]
    assert losses[0] == losses[1], "training is unchanged"
    assert rows[0] != rows[1]
    # A run of a model built with these settings, from the same weights, has the same validation loss.
    with load(runs[1].folder, ExpertsConfig(active=3, capacity="off")) as loaded:
        assert rows[1] == pytest.approx(_validated(loaded, runs[1]), rel=1e-9)


def _validated(loaded: api.Model, it: RunConfig) -> float:
    from colonnade.train.data_feed import CorpusFeed
    from colonnade.train.train_step import evaluate

    held_out = CorpusFeed(it.replace(plan=Plan())).held_out
    assert held_out is not None
    return evaluate(loaded.transformer, held_out.validation_batches(it.train.eval_samples)).item()


def test_bad_eval_overrides_are_refused() -> None:
    for changes, message in (({"eval_active": 5}, "--train.eval_active 4 or less"), ({"eval_capacity": 2.0}, "")):
        config = CONFIG if message else CONFIG.replace(moe=None)
        with pytest.raises(ConfigError, match=message or "--train.eval_capacity would change"):
            RunConfig(model=config, train=Train(**changes))
