"""Chat in a terminal: the note about experts with a capacity, and the chat commands."""

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from colonnade import api
from colonnade.chat import batching_note
from colonnade.checkpoint import native
from colonnade.config import ModelConfig, MoeConfig, RouterConfig
from colonnade.config.presets import preset
from colonnade.conversation import drop_turns
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.tokenizer_files import TURNS
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
    assert "chose among all tokens of a sequence" in batching_note(tiny.config(moe=expert_choice))


def test_old_turns_leave_whole() -> None:
    tokenizer = Tokenizer.train(["words and words"], 270)
    tokenizer.chat_template = TURNS
    system = {"role": "system", "content": "s"}
    talk = [{"role": role, "content": 8 * letter} for letter, role in zip("abcde", 3 * ("user", "assistant"))]  # noqa: B905
    length = len(tokenizer.encode_chat([system, *talk]))
    assert drop_turns([system, *talk], tokenizer, length + 4, 4) == [system, *talk]
    assert drop_turns([system, *talk], tokenizer, length + 3, 4) == [system, *talk[2:]]
    assert drop_turns([system, *talk], tokenizer, 12, 4) == [system, talk[4]]
    assert drop_turns(talk[:1], tokenizer, 2, 4) == talk[:1]  # what cannot fit is refused by the engine
    assert drop_turns(talk, tokenizer, (length - 2) * 8 // 7 + 8, None) == talk


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "flags"), [(48, ["--int8"]), (1024, ["--serve.pages", "4", "--serve.page_tokens", "16"])],
    ids=["context", "cache"],
)  # fmt: skip
def test_a_conversation_outlives_the_context_and_the_cache(tmp_path: Path, context: int, flags: list[str]) -> None:
    """DialoGPT's files, from the question to the answer, with more turns than fit."""
    tokenizer = tiny.tokenizer()
    config = ModelConfig.model_validate(preset("gpt2").model_dump() | {
        "vocab_size": tokenizer.vocab_size, "layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "head_width": 16,
        "ffn_width": 64, "context": context,
    })  # fmt: skip
    path, model = tmp_path / "m", initialise(Transformer(config), 0).requires_grad_(False)
    api.save(api.Model(model, tokenizer, DistributedContext.solo(), "m"), path, format="hf")
    written = json.loads((path / "config.json").read_text())
    written["task_specific_params"] = {"conversational": {"max_length": 1000}}
    (path / "config.json").write_text(json.dumps(written))
    command = [sys.executable, "-m", "colonnade", "chat", str(path), *flags, "--max_tokens", "4", "--device", "cpu"]
    done = subprocess.run(
        command, input=8 * "the quick fox\n", text=True, capture_output=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the context or the KV cache is full: the oldest turns are dropped" in done.stderr
    assert "RequestError" not in done.stderr and "this server holds" not in done.stderr
    assert len(done.stdout.splitlines()) >= 8


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
