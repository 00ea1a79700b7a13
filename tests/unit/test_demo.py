"""The commands that the demo suggests at its end."""

import re
from pathlib import Path

import pytest

from colonnade.cli.main import parse
from colonnade.config import RunConfig
from colonnade.config.presets import preset
from colonnade.demo import _duration, suggestions
from colonnade.train.metrics import Throughput

RUN = RunConfig(name="tour", runs=Path("runs/demo"), model=preset("tour-moe").replace(vocab_size=4096))


def speed(tflops: float) -> Throughput:
    return Throughput(2000, tflops, tflops, None, None)


def test_long_suggestions_state_their_duration() -> None:
    """Estimates 17 M tokens of a model of 110 M parameters at the measured speed of the demo's one process."""
    larger = preset("smollm2-135m").replace(vocab_size=4096)
    flops = 1000 * 32 * 512 * larger.flops_per_token(512, causal=False)
    slow = suggestions(RUN, speed(0.05))
    assert f"about {flops / 0.05e12 / 86400:.0f} days at the speed of this demo, minutes on a GPU" in slow
    assert f"about {flops / 1e12 / 3600:.0f} hours at" in suggestions(RUN, speed(1))
    assert "about hours or days at" in suggestions(RUN, None)
    (line,) = [line for line in slow.splitlines() if "a larger model" in line]
    assert slow.splitlines()[slow.splitlines().index(line) - 1].strip().startswith("[bold]colonnade train")


@pytest.mark.parametrize(("seconds", "text"), [(30, "1 minutes"), (3600, "60 minutes"), (9000, "2 hours"),
                                               (86400, "24 hours"), (200_000, "2 days")])  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


def test_suggested_commands_parse() -> None:
    commands = re.findall(r"\[bold\]colonnade (.+)\[/bold\]", suggestions(RUN, None))
    assert len(commands) == 4
    for command in commands:
        parse(command.split())
