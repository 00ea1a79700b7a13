"""Fine-tuning honours or refuses each setting of a run; a new setting must be listed here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import colonnade
from colonnade.config import DataConfig, DistillConfig, ModelConfig, MoeConfig, Plan, RunConfig, TrainConfig
from colonnade.errors import CapacityError, ConfigError, DataError
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.metrics import Row
from colonnade.train.run_log import RunLog
from colonnade.train.trackers import read_rows
from colonnade.train.training_state import TrainingState
from colonnade.tune import fit
from colonnade.tune.classify import example_feed
from tests.parity.test_classify import examples, start

MODEL = ModelConfig(
    family="bert", vocab_size=67, layers=2, width=32, heads=4, ffn_width=32, context=64, causal=False, segments=2,
    positions="learned", norm="layernorm", norm_order="post", embed_norm=True, gated=False, activation="gelu",
    qkv_bias=True, out_bias=True, ffn_bias=True, tied=True, task_head="classes", classes=3,
)  # fmt: skip
TRAIN = TrainConfig(
    steps=4, batch=4, micro_batch=2, lr=1e-2, min_lr=1e-3, warmup=1, dtype="float64", clip=0.5, save_every=2,
    eval_every=2, eval_samples=7, log_every=1,
)  # fmt: skip
MOE = {"moe": MoeConfig(experts=4, active=2, ffn_width=16, capacity=1.0)}
HALF = {"dtype": "bfloat16"}


class DeterminismTracker:
    """A tracker that records torch's determinism setting."""

    deterministic: list[bool] = []  # noqa: RUF012 - read by the test

    def __init__(self, folder: Path, resumed_step: int):
        pass

    def record(self, step: int, values: Row) -> None:
        self.deterministic.append(torch.are_deterministic_algorithms_enabled())

    def close(self) -> None:
        pass


def config(runs: Path, train: dict[str, Any], data: dict[str, Any], model: dict[str, Any]) -> RunConfig:
    return RunConfig(
        name="it", runs=runs, device="cpu", model=MODEL.replace(**model),
        data=DataConfig(**{"sequence": 32} | data), train=TRAIN.replace(**train),
    )  # fmt: skip


def tuned(run: RunConfig) -> tuple[dict[str, Tensor], list[float]]:
    """(weights, validation losses) of the finished run."""
    fit(run, examples(), examples(7), [DeterminismTracker])
    found = colonnade.load(run.folder, device="cpu", dtype="float64").transformer.state_dict()
    return found, [row["validation_loss"] for row in read_rows(run.folder) if "validation_loss" in row]


CHANGES_WEIGHTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "steps": (3, {}, {}), "batch": (6, {}, {}), "lr": (2e-2, {}, {}), "min_lr": (2e-3, {}, {}), "warmup": (2, {}, {}),
    "schedule": ("linear", {}, {}), "weight_decay": (0.3, {}, {}), "beta1": (0.8, {}, {}), "beta2": (0.9, {}, {}),
    "eps": (1e-4, {}, {}), "clip": (0.1, {}, {}), "freeze": (("embed", "blocks.0"), {}, {}),
    "label_smoothing": (0.1, {}, {}), "dropout": (0.1, {}, {}), "attention_dropout": (0.1, {}, {}),
    "embedding_dropout": (0.1, {}, {}), "expert_dropout": (0.1, {}, MOE), "dtype": ("float32", {}, {}),
    "loss_scale": (8.0, {"dtype": "float16"}, {}),
    "loss_scale_steps": (1, {"dtype": "float16", "loss_scale": 2.0**14}, {}),
    "float8": ("rowwise", HALF, {}), "seed": (1, {}, {}), "pretrained_checkpoint": ("post_encoder", {}, {}),
}  # fmt: skip
"""Settings of [train] that change the weights: the changed value, and what else differs from the base in both runs."""

CHANGES_VALIDATION: dict[str, tuple[Any, dict[str, Any]]] = {
    "eval_every": (1, {}), "eval_samples": (3, {}), "eval_active": (1, MOE), "eval_capacity": (0.25, MOE),
}  # fmt: skip
"""Settings that change only validations."""


def _steps(run: RunConfig) -> list[str]:
    return sorted(path.name for path in run.folder.glob("step-*"))


CHANGES_NOTHING: dict[str, tuple[dict[str, Any], Callable[[RunConfig], bool]]] = {
    "micro_batch": ({"micro_batch": 4}, lambda run: run.micro_batches == 1),
    "recompute": ({"recompute": "full"}, lambda run: all(block.recompute for block in _session(run).model.blocks)),
    "activation_bytes": (
        {"recompute": "budget", "activation_bytes": 100_000},
        lambda run: "allowed for a micro-batch" in (_session(run).recompute_summary or ""),
    ),
    "offload": ({"offload": "optimizer"}, lambda run: type(_session(run).optimizer).__name__ == "OffloadedAdamW"),
    "fused_adamw": ({"fused_adamw": True}, lambda run: type(_session(run).optimizer).__name__ == "FusedAdamW"),
    "profile": ({"profile": 1}, lambda run: (run.folder / "profile").is_dir()),
    "save_every": ({"save_every": 1}, lambda run: _steps(run) == ["step-1", "step-2", "step-3", "step-4"]),
    "keep": ({"keep": 1}, lambda run: _steps(run) == ["step-4"]),
    "keep_every": ({"save_every": 1, "keep": 1, "keep_every": 2}, lambda run: _steps(run) == ["step-2", "step-4"]),
    "async_save": ({"async_save": False}, lambda run: _steps(run) == ["step-2", "step-4"]),
    "log_every": ({"log_every": 3}, lambda run: len([row for row in read_rows(run.folder) if "loss" in row]) == 4),
    "skip_bad_batches": ({"skip_bad_batches": 2}, lambda run: _session(run)._step.optimizer_step._may_skip),
    "timeout_s": ({"timeout_s": 77.0}, lambda run: _session(run).watchdog.timeout_s == 77),
    "deterministic": ({"deterministic": True}, lambda run: DeterminismTracker.deterministic[-1]),
}
"""Settings that change no weight, and how to check that they were honoured."""

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "cuda_graph": ({"cuda_graph": True, "micro_batch": 4, "dtype": "bfloat16"}, {}, "train.cuda_graph needs a GPU"),
    "path": ({}, {"path": Path("elsewhere")}, r"data.path is elsewhere, and applies to text"),
    "separate_documents": ({}, {"separate_documents": False}, r"data.separate_documents is False, and applies to text"),
    "mask_share": ({}, {"mask_share": 0.2}, r"data.mask_share is 0.2, and applies to text"),
    "mask_ngram": ({}, {"mask_ngram": 2}, r"data.mask_ngram is 2, and applies to text"),
    "short_seq_prob": ({}, {"short_seq_prob": 0.5}, r"data.short_seq_prob is 0.5, and applies to text"),
}
"""Settings that are refused, without a GPU or always."""

DISTILL = {
    "teacher", "loss", "mix", "temperature", "beta", "init", "hidden", "on_policy", "cache", "weights", "weight_group",
}  # fmt: skip
"""Settings of [distill], which test_distill_classes tests or refuses."""

TESTED_BELOW = {"compile", "trackers", "restarts", "sequence", "seed (data)", "check_memory", "restart"}
"""Settings with a test of their own below."""


def _session(run: RunConfig) -> TrainingState:
    with DistributedContext.build(run.plan, "cpu") as context:
        return TrainingState(run, context, feed=example_feed(run, examples(), examples(7)))


def test_every_setting_is_listed() -> None:
    fields = set(TrainConfig.model_fields) | {
        "seed (data)" if name == "seed" else name for name in DataConfig.model_fields
    }
    listed = [*CHANGES_WEIGHTS, *CHANGES_VALIDATION, *CHANGES_NOTHING, *REFUSED, *TESTED_BELOW]
    assert sorted(listed) == sorted(fields), "fine-tuning must honour or refuse a new setting; list it here"
    known = {"name", "runs", "device", "model", "plan", "data", "train", "distill"}
    assert set(RunConfig.model_fields) == known, "fine-tuning must honour or refuse a new section of a run"
    assert set(DistillConfig.model_fields) == DISTILL, "test_distill_classes must test or refuse a new setting"


Tuned = tuple[dict[str, Tensor], list[float]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tuned]:
    """Results of a run without the change, cached for all tests that compare with it."""
    known: dict[str, Tuned] = {}

    def base_results(train: dict[str, Any], model: dict[str, Any]) -> Tuned:
        key = repr((train, model))
        if key not in known:
            known[key] = tuned(config(tmp_path_factory.mktemp("base"), train, {}, model))
        return known[key]

    return base_results


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CHANGES_WEIGHTS)
def test_setting_changes_the_weights(name: str, base: Callable[..., Tuned], tmp_path: Path) -> None:
    value, train, model = CHANGES_WEIGHTS[name]
    if name == "pretrained_checkpoint":
        value, model = str(start(tmp_path)), {"width": 24, "heads": 12, "ffn_width": 26, "norm_eps": 1e-12}
    (expected, _), (changed, _) = base(train, model), tuned(config(tmp_path, train | {name: value}, {}, model))
    assert any(not torch.equal(x, changed[key]) for key, x in expected.items()), f"train.{name} is ignored"
    if name == "freeze":
        drawn = initialise(Transformer(MODEL, dtype=torch.float64), 0).state_dict()
        unchanged = {key for key, x in changed.items() if torch.equal(x, drawn[key])}
        assert unchanged == {key for key in drawn if key.startswith(("embed.", "blocks.0."))}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CHANGES_VALIDATION)
def test_setting_changes_validations(name: str, base: Callable[..., Tuned], tmp_path: Path) -> None:
    value, model = CHANGES_VALIDATION[name]
    (expected, losses), (changed, others) = base({}, model), tuned(config(tmp_path, {name: value}, {}, model))
    assert all(torch.equal(x, changed[key]) for key, x in expected.items())
    assert losses != others, f"train.{name} is ignored"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CHANGES_NOTHING)
def test_setting_is_honoured_and_changes_no_weight(name: str, base: Callable[..., Tuned], tmp_path: Path) -> None:
    train, honoured = CHANGES_NOTHING[name]
    run = config(tmp_path, train, {}, {})
    (expected, _), (changed, _) = base({}, {}), tuned(run)
    for key, x in expected.items():
        torch.testing.assert_close(changed[key], x, rtol=1e-9, atol=1e-9)
    assert honoured(run), f"train.{name} is ignored"


@pytest.mark.parametrize("name", REFUSED)
def test_setting_is_refused(name: str, tmp_path: Path) -> None:
    train, data, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        fit(config(tmp_path, train, data, {}), examples(), examples(7))


def test_compile_setting_compiles_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[torch.nn.Module] = []

    def note(module: torch.nn.Module) -> None:
        compiled.append(module)

    monkeypatch.setattr(torch.nn.Module, "compile", note)
    assert compiled == [*_session(config(tmp_path, {"compile": True}, {}, {})).model.blocks]


def test_trackers_and_restarts_are_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(tmp_path, {"trackers": ("mlflow",), "restarts": 2}, {}, {})
    assert len(RunLog(_session(run))._open_trackers) == 3, "besides JSON lines and TensorBoard"
    monkeypatch.setattr("colonnade.train.loop.launch", lambda *asked: asked)
    _, (passed, _, _), plan, restarts = fit(run, examples(), examples(7))  # type: ignore[misc]
    assert (passed, plan, restarts) == (run, run.plan, 2)


@pytest.mark.slow
def test_data_sequence_and_seed_are_honoured(base: Callable[..., Tuned], tmp_path: Path) -> None:
    """The sequence bounds examples and numbers their tokens for dropout; the seed orders them."""
    expected, _ = base({}, {})
    longer, other = (tuned(config(tmp_path / str(data), {}, data, {}))[0] for data in ({"sequence": 48}, {"seed": 1}))
    assert all(torch.equal(x, longer[key]) for key, x in expected.items())
    assert any(not torch.equal(x, other[key]) for key, x in expected.items())
    with pytest.raises(ConfigError, match=r"data.sequence is 32, but .* was trained with 48"):
        tuned(config(tmp_path / str({"sequence": 48}), {"steps": 5}, {}, {}))


@pytest.mark.slow
def test_resume_with_other_examples_needs_data_restart(tmp_path: Path) -> None:
    run = config(tmp_path, {"steps": 2, "eval_every": 0}, {}, {})
    fit(run, examples())
    longer = run.replace(train=run.train.replace(steps=3))
    with pytest.raises(
        DataError, match=r"is not the data that .*step-2 was trained on: other examples.*--data.restart"
    ):
        fit(longer, examples(7))
    assert fit(longer.replace(data=run.data.replace(restart=True)), examples(7)).steps == 3


def test_memory_is_checked_unless_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colonnade.train.memory_advice.free_host_bytes", lambda: 1 << 20)
    run = config(tmp_path, {"steps": 1, "eval_every": 0}, {}, {})
    with pytest.raises(CapacityError, match="nothing was allocated"):
        fit(run, examples())
    assert fit(run.replace(train=run.train.replace(check_memory=False)), examples()).steps == 1


def test_unsuitable_models_and_plans_are_refused(tmp_path: Path) -> None:
    good = config(tmp_path, {}, {}, {})
    with pytest.raises(ConfigError, match=r"needs a model with task_head = 'classes', not 'encoder'"):
        fit(good.replace(model=MODEL.replace(task_head="encoder", classes=0)), examples())
    mixed = good.replace(model=MODEL.replace(**MOE), plan=Plan(pp=2))
    with pytest.raises(ConfigError, match=r"plan.pp needs micro-batches of one shape"):
        fit(mixed, examples())
