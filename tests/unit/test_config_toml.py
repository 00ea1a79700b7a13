"""TOML configs: written files read back equal, and errors name file and line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config import DataConfig, ModelConfig, Plan, RopeScaling, RunConfig, ServeConfig, TrainConfig
from colonnade.config.presets import PRESETS, preset
from colonnade.config.toml import dumps, parse, read, write
from colonnade.errors import ConfigError


@pytest.mark.sample(18)
@pytest.mark.parametrize("name", PRESETS)
def test_a_run_of_every_preset_reads_back_equal(name: str, tmp_path: Path) -> None:
    model = preset(name)
    if not (model.causal or model.predicts_masked):
        model = model.replace(task_head="pretraining")  # not trainable as it is
    run = RunConfig(model=model, train=TrainConfig(clip=float("inf")), data=DataConfig(path=tmp_path / "ä b"))
    write(run, tmp_path / "run.toml")
    assert read(RunConfig, tmp_path / "run.toml") == run


@pytest.mark.slow
@given(
    name=st.text(min_size=1).filter(lambda name: not Path(name).is_absolute() and ".." not in Path(name).parts),
    lr=st.floats(1e-300, 1e15),
    scaling=st.none() | st.builds(RopeScaling, kind=st.just("yarn"), factor=st.floats(1, 9), truncate=st.booleans()),
)
def test_any_value_round_trips(name: str, lr: float, scaling: RopeScaling | None) -> None:
    model = preset("tour").replace(rope_scaling=scaling)
    run = RunConfig(name=name, model=model, train=TrainConfig(lr=lr, min_lr=lr))
    assert parse(RunConfig, dumps(run)) == run


def test_none_is_omitted_and_docstrings_become_comments() -> None:
    text = dumps(ServeConfig())
    assert "pages" not in [line.split(" = ")[0] for line in text.splitlines()]
    assert "max_requests = 64 # Maximum number of requests in one forward pass." in text.splitlines()


RUN = """\
name = "mine"

[model]
vocab_size = 64
layers = 1
width = 8
heads = 2
ffn_width = 16

[model.rope_scaling]
kind = "linear"
factor = 2.0

[train]
steps = 20
warmup = 5
"""


def test_a_partial_file_is_completed_from_a_base() -> None:
    run = parse(RunConfig, RUN.replace("[train]", "[data]\nsequence = 32\n[train]"))
    assert (run.train.steps, run.train.batch, run.data.sequence) == (20, TrainConfig().batch, 32)
    base = run.replace(plan=Plan(tp=2), train=run.train.replace(batch=6))
    merged = parse(RunConfig, "[train]\nlr = 0.001\n[model]\nlayers = 3", base=base)
    assert merged == base.replace(train=base.train.replace(lr=0.001), model=base.model.replace(layers=3))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("steps = 20", "stpes = 20", r"run.toml:15: TrainConfig has no key 'stpes'; did you mean 'steps'\?"),
        (
            "warmup = 5",
            "warmup = 50",
            r"run.toml:1[56]: --train.warmup 50 is longer than the run of 20 steps; lower it",
        ),
        ("factor = 2.0", "factor = -2.0", r"run.toml:12: RopeScaling.factor is -2.0: input should be greater than 0"),
        ("layers = 1", 'layers = "one"', r"run.toml:5: ModelConfig.layers is 'one'"),
        ("layers = 1\n", "", r"run.toml:3: ModelConfig needs 'layers'"),
        ("[train]", "[trian]", r"run.toml:14: RunConfig has no key 'trian'; did you mean 'train'\?"),
        ('name = "mine"', "name = mine", r"run.toml:1: not TOML: invalid value"),
        ("steps = 20", "steps = 20\nsteps = 21", r"run.toml:16: not TOML: cannot overwrite a value"),
        ("warmup = 5\n", "warmup = [5,", r"run.toml:16: not TOML"),
    ],
)
def test_errors_name_file_and_line(before: str, after: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN.replace(before, after))
    with pytest.raises(ConfigError, match=message) as caught:
        read(RunConfig, file)
    assert "\n" not in str(caught.value)


def test_errors_in_dotted_keys_name_the_line() -> None:
    with pytest.raises(ConfigError, match=r"TOML:2: TrainConfig has no key 'lrr'"):
        parse(RunConfig, 'name = "x"\ntrain.lrr = 1', base=RunConfig(model=preset("tour")))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.toml cannot be read"):
        read(ServeConfig, tmp_path / "missing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary.toml cannot be read"):
        read(ServeConfig, tmp_path / "binary.toml")


def test_a_model_config_round_trips() -> None:
    config = ModelConfig(vocab_size=7, layers=1, width=8, heads=2, ffn_width=9, window=3)
    assert parse(ModelConfig, dumps(config)) == config
