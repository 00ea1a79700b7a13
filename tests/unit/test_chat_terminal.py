"""Chat in a terminal: the note about experts with a capacity, and the chat commands."""

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


def test_note_about_limited_expert_capacity() -> None:
    for capacity in (None, 0):
        assert batching_note(tiny.config(moe=MoeConfig(experts=4, ffn_width=8, capacity=capacity))) == ""
    assert batching_note(tiny.config()) == ""
    note = batching_note(tiny.config(moe=MoeConfig(experts=4, ffn_width=8, capacity=1.25)))
    assert note.startswith("note: experts with a capacity (factor 1.25)")
    assert note.endswith("--experts.capacity off drops none")
    expert_choice = MoeConfig(experts=4, ffn_width=8, capacity=1, router=RouterConfig(kind="expert_choice"))
    assert "chose among all tokens of a text" in batching_note(tiny.config(moe=expert_choice))


@pytest.mark.slow
def test_terminal_chat_has_commands_and_line_editing(tmp_path: Path) -> None:
    """In a pseudo-terminal: the up arrow recalls the previous line."""
    tokenizer = tiny.tokenizer()
    config = ModelConfig(vocab_size=tokenizer.vocab_size, layers=1, width=16, heads=2, ffn_width=16, context=96)
    path = tmp_path / "tiny"
    native.save(
        path,
        initialise(Transformer(config), 0),
        native.Meta(model=config),
        DistributedContext.solo(),
        tokenizer=tokenizer,
    )
    keys, terminal = pty.openpty()
    command = [sys.executable, "-m", "colonnade", "chat", str(path), "--max_tokens", "3", "--device", "cpu"]
    env = os.environ | {"TERM": "xterm", "INPUTRC": os.devnull}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env, close_fds=True)
    os.close(terminal)
    output = ""

    def read_until(text: str, times: int = 1) -> None:
        nonlocal output
        while output.count(text) < times:
            assert select.select([keys], [], [], 100)[0], output
            output += os.read(keys, 4096).decode(errors="replace")

    try:
        read_until("> ")
        os.write(keys, b"/help\n")
        read_until("starts a new conversation")
        os.write(keys, b"/hepl\n")
        read_until("there is no command /hepl; did you mean '/help'?")
        os.write(keys, b"\x1b[A\x1b[A\n")  # up, up: /help
        read_until("starts a new conversation", 2)
        os.write(keys, b"/quit\n")
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.wait()
        os.close(keys)
