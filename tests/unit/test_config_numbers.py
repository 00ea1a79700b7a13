"""Any number given to a setting yields a config or a ConfigError, nothing else."""

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from colonnade import (
    DataConfig,
    DistillConfig,
    EncoderConfig,
    ExpertsConfig,
    LatentConfig,
    LoraConfig,
    ModelConfig,
    MoeConfig,
    Plan,
    Recipe,
    RelativePositions,
    RopeScaling,
    RouterConfig,
    ServeConfig,
    SpeechConfig,
    TrainConfig,
    TuneConfig,
    preset,
)
from colonnade.checkpoint.hf.write import write_hf
from colonnade.cli import main
from colonnade.config import Config
from colonnade.errors import ConfigError, PlanError, RequestError
from colonnade.model import Packed, Rows, Stream, Transformer, initialise
from colonnade.model.score import score
from tests.serve import tiny

CONFIGS: tuple[Config, ...] = (
    preset("tour"),
    RopeScaling(kind="yarn", factor=2.0),
    EncoderConfig(layers=2),
    RelativePositions(),
    MoeConfig(experts=8, ffn_width=32),
    RouterConfig(),
    LatentConfig(kv_rank=8, rope_width=2, v_width=4),
    ExpertsConfig(),
    Plan(),
    DataConfig(),
    DistillConfig(),
    TrainConfig(),
    TuneConfig(),
    LoraConfig(),
    ServeConfig(),
    Recipe(),
    SpeechConfig(),
)
ALLOWED = {("TrainConfig", "clip", math.inf)}
SIGNED = {"capacity", "eval_capacity"}
"""Fields where negative values have a meaning (Tutel's capacity factors)."""


def _numbers(annotation: Any) -> set[type]:
    """The number types in an annotation."""
    if annotation in (int, float):
        return {annotation}
    return {kind for part in get_args(annotation) if not isinstance(part, str) for kind in _numbers(part)}


FIELDS = [
    (config, name, kinds)
    for config in CONFIGS
    for name, field in type(config).model_fields.items()
    if (kinds := _numbers(field.annotation))
]


@pytest.mark.parametrize(("config", "name", "kinds"), FIELDS, ids=[f"{type(c).__name__}.{n}" for c, n, _ in FIELDS])
def test_extreme_numbers_are_config_errors(config: Config, name: str, kinds: set[type]) -> None:
    absurd: list[float] = [10**30, -(10**30), 2**63]
    if name not in SIGNED:
        absurd += [-1]
    if float in kinds:
        absurd += [1e300, 1e20, -1e300, math.nan, math.inf, -math.inf]
    several = "tuple" in str(type(config).model_fields[name].annotation)
    for value in absurd:
        if (type(config).__name__, name, value) in ALLOWED:
            continue
        with pytest.raises((ConfigError, PlanError)) as caught:
            config.replace(**{name: (value,) if several else value})
        assert "\n" not in str(caught.value)


def test_every_config_with_numbers_is_tested() -> None:
    """A new config class must be added to WHOLE."""
    with_numbers = {
        kind.__name__
        for kind in Config.__subclasses__()
        if kind.__module__.startswith("colonnade.config")
        and any(_numbers(field.annotation) for field in kind.model_fields.values())
    }
    assert with_numbers == {type(config).__name__ for config in CONFIGS}


def test_the_largest_capacity_runs() -> None:
    """Regression: 1e20 raised a bare OverflowError in the first forward pass."""
    moe = MoeConfig(experts=2, active=1, ffn_width=4, capacity=1e6)
    config = ModelConfig(vocab_size=7, layers=1, width=8, heads=2, ffn_width=4, moe=moe)
    model = initialise(Transformer(config), 0)
    tokens_T = torch.arange(5)
    assert model(Stream(tokens_T, tokens_T), Packed.of([5], "cpu"), Rows()).isfinite().all()
    with pytest.raises(ConfigError, match=r"MoeConfig.capacity.* less than or equal to 1000000"):
        moe.replace(capacity=1e20)


def test_sizes_beyond_any_machine_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"1.38e\+16 parameters are more than any machine can hold"):
        preset("tour").replace(width=2**24, heads=2**10, kv_heads=2**10)
    with pytest.raises(PlanError, match=r"4,294,967,296 processes, more than 1,048,576; lower its axes"):
        Plan(tp=1 << 16, dp=1 << 16)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["corpus", "t.txt", "--vocab_size", "0"], "--vocab_size 0 is not from 1 to"),
        (["corpus", "t.txt", "--vocab_size", str(10**30)], "is not from 1 to 2147483648; 8192 is usual"),
        (["corpus", "t.txt", "--validation_share", "nan"], "--validation_share nan is not in"),
        (["verify", "--world", "100000"], "--world 100000 is not from 1 to 64"),
        (["demo", "--port", "65536"], "--port 65536 is not from 0 to 65535"),
        (["convert", "smollm2", "x", "--upcycle", "-3"], "a token cannot go to 2 of -3 experts"),
    ],
)
def test_extreme_numbers_in_flags_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("columns bear loads " * 99)
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 1
    assert message in capsys.readouterr().err


def test_windows_and_shards_of_size_zero_are_refused(tmp_path: Path) -> None:
    """Regression: zero was taken for the default."""
    model = tiny.model()
    for windows in ({"context": 0}, {"context": 8, "stride": 0}):
        with pytest.raises(RequestError, match="choose 0 < stride <= context"):
            score(model, [1, 2, 3], **windows)
    with pytest.raises(ConfigError, match="shard_bytes 0 is not positive"):
        write_hf(model, tmp_path / "hf", shard_bytes=0)
