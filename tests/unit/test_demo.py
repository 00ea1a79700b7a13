"""What the demo proposes at its end."""

import re
from pathlib import Path

import pytest

from colonnade.cli.main import parse
from colonnade.config import RunConfig
from colonnade.config.presets import preset
from colonnade.demo import _duration, suggestions
from colonnade.train.mfu import Throughput

RUN = RunConfig(name="tour", runs=Path("runs/demo"), model=preset("tour-moe").replace(vocab_size=4096))


def speed(tflops: float) -> Throughput:
    return Throughput(2000, tflops, tflops, None, None)


def test_what_takes_long_says_how_long() -> None:
    """At the measured speed of one process, of which there was one: 17 M tokens of a model of 110 M parameters."""
    larger = preset("smollm2-135m").replace(vocab_size=4096)
    flops = 1000 * 32 * 512 * larger.flops_per_token(512, causal=False)
    slow = suggestions(RUN, speed(0.05))
    assert f"about {flops / 0.05e12 / 86400:.0f} days at the speed of this demo, minutes on a GPU" in slow
    assert f"about {flops / 1e12 / 3600:.0f} hours at" in suggestions(RUN, speed(1))
    assert "about hours or days at" in suggestions(RUN, None)
    (line,) = [line for line in slow.splitlines() if "a larger model" in line]
    assert slow.splitlines()[slow.splitlines().index(line) - 1].strip().startswith("[bold]colonnade train")


@pytest.mark.parametrize(("seconds", "said"), [(30, "1 minutes"), (3600, "60 minutes"), (9000, "2 hours"),
                                               (86400, "24 hours"), (200_000, "2 days")])  # fmt: skip
def test_durations(seconds: float, said: str) -> None:
    assert _duration(seconds) == said


def test_commands_are_ones_that_there_are() -> None:
    found = re.findall(r"\[bold\]colonnade (.+)\[/bold\]", suggestions(RUN, None))
    assert len(found) == 4
    for command in found:
        parse(command.split())
