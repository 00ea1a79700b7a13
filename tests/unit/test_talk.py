"""Talking on a terminal: what is said before a model with experts that count tokens, and the commands of a chat."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from colonnade.chat import batching_note
from colonnade.checkpoint import native
from colonnade.config import ModelConfig, MoeConfig, RouterConfig
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from tests.serve import tiny


def test_who_has_no_place_for_all_is_told() -> None:
    for capacity in (None, 0):
        assert batching_note(tiny.config(moe=MoeConfig(experts=4, ffn_width=8, capacity=capacity))) == ""
    assert batching_note(tiny.config()) == ""
    said = batching_note(tiny.config(moe=MoeConfig(experts=4, ffn_width=8, capacity=1.25)))
    assert said.startswith("note: experts with a capacity (factor 1.25)")
    assert said.endswith("--experts.capacity off drops none")
    chosen = MoeConfig(experts=4, ffn_width=8, capacity=1, router=RouterConfig(kind="expert_choice"))
    assert "chose among all tokens of a text" in batching_note(tiny.config(moe=chosen))


@pytest.mark.slow
def test_a_chat_on_a_terminal_has_commands_and_line_editing(tmp_path: Path) -> None:
    """Typed into a terminal: the up arrow brings the last line again."""
    words = tiny.tokenizer()
    config = ModelConfig(vocab_size=words.vocab_size, layers=1, width=16, heads=2, ffn_width=16, context=96)
    place = tmp_path / "tiny"
    native.save(
        place, initialise(Transformer(config), 0), native.Meta(model=config), DistributedContext.solo(), tokenizer=words
    )
    keys, terminal = pty.openpty()
    command = [sys.executable, "-m", "colonnade", "chat", str(place), "--max_tokens", "3", "--device", "cpu"]
    env = os.environ | {"TERM": "xterm", "INPUTRC": os.devnull}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env, close_fds=True)
    os.close(terminal)
    said = ""

    def until(text: str, times: int = 1) -> None:
        nonlocal said
        while said.count(text) < times:
            assert select.select([keys], [], [], 100)[0], said
            said += os.read(keys, 4096).decode(errors="replace")

    try:
        until("> ")
        os.write(keys, b"/help\n")
        until("starts a new conversation")
        os.write(keys, b"/hepl\n")
        until("there is no command /hepl; did you mean '/help'?")
        os.write(keys, b"\x1b[A\x1b[A\n")  # up, up: /help
        until("starts a new conversation", 2)
        os.write(keys, b"/quit\n")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(keys)
