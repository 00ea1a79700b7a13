"""A changed size updates the sizes derived from it, in Python, in files and in flags."""

import re
from pathlib import Path
from typing import Any

import pytest

from colonnade import ModelConfig, MoeConfig, RunConfig, TrainConfig
from colonnade.cli import main
from colonnade.cli.training import train_defaults
from colonnade.config import Config, DataConfig
from colonnade.config.derive import flatten, replace_paths
from colonnade.config.presets import PRESETS, preset
from colonnade.config.toml import dumps, parse
from colonnade.errors import ConfigError
from colonnade.model import Transformer

FOLLOWERS = {
    "width": {"head_width", "ffn_width", "moe.ffn_width", "moe.shared_width"},
    "heads": {"kv_heads", "head_width"},
    "ffn_width": {"moe.ffn_width", "moe.shared_width"},
    "moe.ffn_width": {"moe.shared_width"},
}
"""The fields that may change with a field; no others may."""

MAY_BE_REFUSED = {
    "kv_heads", "classes", "segments", "latent.v_width", "moe.active", "moe.router.groups", "moe.router.groups_kept",
    "moe.router.nodes", "moe.router.task",
}  # fmt: skip
"""Fields whose doubled value may contradict the others: refused with an error."""


def sizes(model: Config) -> dict[str, Any]:
    """The integers of a config by dotted name, without booleans."""
    flat = flatten(model.model_dump())
    return {name: value for name, value in flat.items() if type(value) is int}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", PRESETS)
def test_a_changed_size_updates_derived_sizes(name: str) -> None:
    before = preset(name)
    refused: list[str] = []
    for field, value in sizes(before).items():
        change = {field: 2 * value or 1}
        try:
            after = ModelConfig(**_all_fields(_by_replace(before, change)))
        except ConfigError:
            refused.append(field)
            continue
        sizes_before, sizes_after = sizes(before), sizes(after)
        changed = {other for other in sizes_before if sizes_before[other] != sizes_after[other]}
        assert field in changed
        assert changed <= {field} | FOLLOWERS.get(field, set()), field
        _check_ratios(before, after, field)
        assert _by_file(before, change) == after, f"{field}, in a file"
        assert _by_flags(name, change) == after, f"{field}, as a flag"
    assert set(refused) <= MAY_BE_REFUSED


def _check_ratios(before: ModelConfig, after: ModelConfig, field: str) -> None:
    if field != "kv_heads":
        assert after.group == before.group
    if field != "head_width" and before.head_width * before.heads == before.width:
        assert after.head_width * after.heads == after.width
    if field != "ffn_width":
        assert 0 <= after.ffn_width - before.ffn_width * after.width / before.width < 16
    if before.moe is not None and after.moe is not None and field != "moe.ffn_width":
        grown = after.moe.ffn_width / before.moe.ffn_width
        same = field == "width" or (field == "ffn_width" and before.expert_layers == before.layers)
        assert grown == 2 if same else grown in (1, 2)
    if before.moe is not None and after.moe is not None and field != "moe.shared_width":
        assert after.moe.shared_width * before.moe.ffn_width == before.moe.shared_width * after.moe.ffn_width


def _all_fields(model: ModelConfig) -> dict[str, Any]:
    return {name: getattr(model, name) for name in ModelConfig.model_fields}


def _by_replace(model: ModelConfig, change: dict[str, int]) -> ModelConfig:
    """Applies a change in Python: a section is changed by its own ``replace``."""
    ((field, value),) = change.items()
    section, _, inner = field.rpartition(".")
    if not section:
        return model.replace(**change)
    first, _, second = section.partition(".")
    part = getattr(model, first)
    if second:
        return model.replace(**{first: part.replace(**{second: getattr(part, second).replace(**{inner: value})})})
    return model.replace(**{first: part.replace(**{inner: value})})


def _by_file(model: ModelConfig, change: dict[str, int]) -> ModelConfig:
    ((field, value),) = change.items()
    return parse(RunConfig, f"model.{field} = {value}", base=RunConfig(model=_trainable(model))).model.replace(
        task_head=model.task_head, classes=model.classes
    )


def _by_flags(name: str, change: dict[str, int]) -> ModelConfig:
    """Applies a change as a flag, by the parser's defaults and the flag itself."""
    ((field, value),) = change.items()
    if not (preset(name).causal or preset(name).predicts_masked):
        return preset(name).replace(**change)  # not trainable
    args, _ = train_defaults(["--preset", name, f"--model.{field}", str(value)])
    return ModelConfig(**_all_fields(replace_paths(args.run.model, change)))


def _trainable(model: ModelConfig) -> ModelConfig:
    return model if model.causal or model.predicts_masked else model.replace(task_head="pretraining")


@pytest.mark.parametrize(
    "name", ["tour", "tour-moe", "gpt2-switch-8", "deepseek-v2-lite", "qwen1.5-moe-a2.7b", "bert-tour"]
)
def test_a_wider_model_builds_with_the_counted_parameters(name: str) -> None:
    model = preset(name).replace(layers=2, vocab_size=64)
    wider = model.replace(width=3 * model.width // 2)
    assert sum(p.numel() for p in Transformer(wider, device="meta").parameters()) == wider.parameters


def test_derived_sizes_of_published_models() -> None:
    def changed(name: str, **changes: int) -> tuple[int, ...]:
        model = preset(name).replace(**changes)
        experts = () if model.moe is None else (model.moe.ffn_width, model.moe.shared_width)
        return (model.kv_heads, model.head_width, model.ffn_width, *experts)

    assert changed("tour", width=768) == (4, 96, 2112), "ffn_width is 704 at width 256"
    assert changed("tour", width=264, head_width=32) == (4, 32, 736), "726 rounded up to a multiple of 16"
    assert changed("gpt2", width=1536) == (12, 128, 6144), "four times the width"
    assert changed("llama-3-8b", heads=16) == (4, 256, 14336), "four query heads a key/value head"
    assert changed("smollm2-135m", heads=8) == (2, 72, 1536), "3 does not divide 8 heads, so the group is 4"
    assert changed("qwen3-0.6b", width=512) == (8, 128, 1536), "heads of their own width"
    assert changed("mixtral-8x7b", width=2048) == (8, 64, 7168, 7168, 0)
    assert changed("tour-moe", ffn_width=1408) == (4, 32, 1408, 704, 0), (
        "no layer is dense, so ffn_width is the experts'"
    )
    assert changed("deepseek-v3", ffn_width=9216) == (128, 192, 9216, 2048, 2048), "its dense layers only"
    assert changed("qwen1.5-moe-a2.7b", width=1024) == (16, 64, 2816, 704, 2816)


def test_explicit_values_are_kept() -> None:
    tour = preset("tour-moe")
    model = tour.replace(width=512, heads=16, ffn_width=100, kv_heads=16, head_width=8)
    assert (model.ffn_width, model.kv_heads, model.head_width) == (100, 16, 8)
    whole = MoeConfig(experts=4, ffn_width=352)
    assert tour.replace(width=512, moe=whole).moe == whole, "a complete section is taken as it is"
    file = "[model]\nwidth = 512\n[model.moe]\nffn_width = 352\n"
    assert parse(RunConfig, file, base=RunConfig(model=tour)).model.moe == tour.moe
    file = "[model]\nwidth = 512\n[model.moe]\nexperts = 4\n"
    moe = parse(RunConfig, file, base=RunConfig(model=tour)).model.moe
    assert moe is not None
    assert (moe.experts, moe.ffn_width) == (4, 704)


def test_adding_experts_changes_the_family() -> None:
    """A dense model that gets experts from a file can be saved for Hugging Face."""
    run = parse(RunConfig, "[model.moe]\nexperts = 4\n", base=RunConfig(model=preset("tour")))
    assert run.model.moe is not None
    assert (run.model.family, run.model.moe.ffn_width) == ("mixtral", 704)
    assert preset("mistral-7b").replace(moe=run.model.moe).family == "mixtral"
    assert preset("tour-moe").replace(moe=None).family == "llama"
    assert preset("tour-moe").replace(moe=None, family="mistral").family == "mistral"


def test_learning_rate_and_sequence_are_derived() -> None:
    assert TrainConfig(lr=1e-5).final_lr == pytest.approx(1e-6)
    assert TrainConfig(lr=1e-5, min_lr=1e-5).replace(steps=9).final_lr == 1e-5
    assert TrainConfig().replace(lr=1e-5).final_lr == pytest.approx(1e-6)
    run = RunConfig(model=preset("tour").replace(context=128), data=DataConfig(path=Path("x")))
    assert run.data.sequence == 128
    assert run.replace(model=preset("tour")).data.sequence == 512
    short = run.replace(data=DataConfig(sequence=64))
    assert short.replace(model=preset("tour")).data.sequence == 64
    assert parse(RunConfig, "[model]\ncontext = 99\n", base=RunConfig(model=preset("tour"))).data.sequence == 99
    with pytest.raises(ConfigError, match=r"data.sequence 512 is longer than the model's context 128"):
        RunConfig(model=preset("tour").replace(context=128), data=DataConfig(sequence=512))


def test_derived_values_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nowhere = ["--data.path", str(tmp_path / "none"), "--dry_run"]
    argv = ["--model.width", "768", "--train.lr=1e-5", "--train.steps", "50", "--model.context", "256"]
    main(["train", *argv, *nowhere])
    err = capsys.readouterr().err
    (line,) = (line for line in err.splitlines() if line.startswith("derived: "))
    assert line == (
        "derived: model.head_width 96, model.ffn_width 2112, train.min_lr 1e-06, train.warmup 5, data.sequence 256"
    )
    main(["train", "--model.width", "768", "--model.ffn-width", "99", "--model.head_width", "32", *nowhere])
    assert "derived: " not in capsys.readouterr().err
    file = tmp_path / "run.toml"
    file.write_text(dumps(RunConfig(model=preset("tour"))))
    main(["train", "--config", str(file), "--model.width", "512", *nowhere])
    out, err = capsys.readouterr()
    assert "ffn_width = 1408" in out, "flags derive sizes from a complete file as from a preset"
    assert re.search(r"^derived: model.head_width 64, model.ffn_width 1408$", err, re.M)


def test_fewer_layers_keep_expert_layers() -> None:
    """DeepSeek-V3's first 3 layers are dense, so 2 layers would silently have no experts."""
    small = preset("deepseek-v3").replace(layers=2)
    assert small.moe is not None
    assert (small.moe.first_k_dense_replace, small.expert_layers) == (1, 1)
    assert preset("deepseek-v3").replace(layers=9).moe == preset("deepseek-v3").moe
