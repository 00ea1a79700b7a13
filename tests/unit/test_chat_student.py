"""The example of a GPT-2 that learns a teacher's answers: from the answers to a chat in 8 bits."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from colonnade.checkpoint.load_model import find_packaged
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError

PLACES = ["Paris", "Berlin", "Madrid", "Rome", "Lisbon", "Athens", "Oslo", "Cairo"]
THINGS = ["tower", "river", "gate", "market", "bridge", "school", "garden", "museum"]


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "chat_student", Path(__file__).parents[2] / "examples/chat_student.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said(folder: Path, questions: list[str]) -> list[str]:
    """The answers of ``colonnade chat --int8``, each in a conversation of its own."""
    command = [sys.executable, "-m", "colonnade", "chat", str(folder), "--int8", "--temperature", "0"]
    lines = "".join(f"{question}\n/reset\n" for question in questions)
    done = subprocess.run(
        [*command, "--max_tokens", "32", "--device", "cpu"], input=lines, text=True, capture_output=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.strip()]


@pytest.mark.slow
def test_the_student_says_in_8_bits_what_it_was_taught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [f"Where is the {thing}?" for thing in THINGS]
    taught = [f"It is in {place}." for place in PLACES]
    args = argparse.Namespace(out=tmp_path / "student", bpe=None, layers=1, width=64, steps=80)
    module = example()
    monkeypatch.setattr(module, "HELD_OUT", 2)
    shares = module.teach(args, module.bpe_files(None), questions, taught, tmp_path / "runs")
    assert shares["taught"] == 1.0
    config = json.loads((args.out / "config.json").read_text())
    assert config["model_type"] == "gpt2" and "conversational" in config["task_specific_params"]
    assert {path.name for path in args.out.glob("*.json*")} >= {"vocab.json"}
    assert not (args.out / "tokenizer_config.json").exists(), "the template follows from config.json alone"
    tokenizer = Tokenizer.from_model(args.out)
    assert tokenizer is not None and tokenizer.eos_ids == (50256,)
    assert said(args.out, questions[:3]) == taught[:3]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_example_runs_with_smollm2(tmp_path: Path) -> None:
    try:
        find_packaged("smollm2")
    except CheckpointError as why:
        pytest.skip(str(why))
    shares = example().main([str(tmp_path / "student")])
    assert shares["taught"] >= 0.7
    assert shares["held out"] <= 0.3, "it knows nothing else"


def test_arguments_are_checked_before_the_teacher_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, out = example(), tmp_path / "out"
    monkeypatch.setattr(module.colonnade, "load", lambda *_, **__: pytest.fail("the teacher was loaded"))
    for words, message in (
        ([str(tmp_path)], f"{tmp_path} exists"),
        ([str(out), "--questions", "8"], "8 are held out; use at least 9"),
        ([str(out), "--width", "100"], "--width 100 is not a multiple of 64"),
        ([str(out), "--steps", "0"], "--steps 0"),
        ([str(out), "--bpe", str(tmp_path)], "has no vocab.json and no merges.txt"),
    ):
        with pytest.raises(SystemExit) as ended:
            module.main(words)
        assert message in str(ended.value) + capsys.readouterr().err
