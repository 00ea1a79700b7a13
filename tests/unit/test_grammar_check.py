"""Grammars of clients are compiled in a process first, which is killed if it takes too much."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from colonnade.errors import RequestError
from colonnade.serve import grammar_check
from colonnade.serve.grammar import GrammarCompiler
from colonnade.serve.grammar_check import GrammarChecker
from colonnade.serve.structured_outputs import StructuredOutputs
from tests.serve import tiny

pytest.importorskip("llguidance", reason="needs the extra 'serve'")

HOSTILE = {"type": "array", "prefixItems": [{"type": "integer", "multipleOf": 9973 + i} for i in range(900)]}
"""38 KB that compile for over a minute, and take 10 MB more every second."""


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    compiler = GrammarCompiler(tiny.tokenizer(), 301)
    it = GrammarChecker(compiler)
    compiler.check = it.check
    yield it
    it.close()


def process_of(checker: GrammarChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


def test_a_hostile_grammar_is_stopped(checker: GrammarChecker):
    """Nothing goes on after the refusal, and the next grammar is compiled by a new process."""
    checker.check(StructuredOutputs(regex="a+"))
    first = process_of(checker)
    with pytest.raises(RequestError, match="json cannot be compiled: it takes over 2 s; simplify it") as refusal:
        checker.check(StructuredOutputs(json=HOSTILE))
    assert refusal.value.code == "invalid_grammar" and refusal.value.param == "structured_outputs"
    assert not Path(f"/proc/{first}").exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "compile-grammar"]
    checker.check(StructuredOutputs(regex="a+"))
    assert process_of(checker) != first


def test_a_grammar_that_takes_too_much_memory_is_refused(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch):
    """The process dies of its limit, here of a signal that stands for it."""
    checker.check(StructuredOutputs(regex="a+"))
    pid, receive = process_of(checker), grammar_check._receive

    def die(process: object, most_s: float) -> object:
        checker._process.kill()  # type: ignore[union-attr]
        return receive(process, most_s)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar_check, "_receive", die)
    with pytest.raises(RequestError, match="it takes over 2 GiB of memory"):
        checker.check(StructuredOutputs(json=HOSTILE))
    monkeypatch.undo()
    checker.check(StructuredOutputs(regex="a+"))
    assert process_of(checker) != pid


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (StructuredOutputs(regex="("), "regex cannot be compiled"),
        (StructuredOutputs(grammar="start: missing"), "grammar cannot be compiled"),
        (StructuredOutputs(grammar="root ::= " + "(" * 9000 + '"a"' + ")" * 9000), "grammar cannot be read"),
        (StructuredOutputs(json={"type": "string", "minLength": 5, "maxLength": 3}), "json cannot be compiled"),
    ],
)
def test_errors_are_those_of_the_compiler(checker: GrammarChecker, wanted: StructuredOutputs, words: str):
    compiler = GrammarCompiler(tiny.tokenizer(), 301)
    with pytest.raises(RequestError, match=words) as direct:
        compiler.matcher(wanted)
    with pytest.raises(RequestError) as checked:
        checker.check(wanted)
    depth = " while calling a Python object"  # Python says where the recursion ended
    assert str(checked.value).replace(depth, "") == str(direct.value).replace(depth, "")


def test_a_compiler_with_a_checker_gives_the_same_masks(checker: GrammarChecker):
    checked, plain = checker._compiler, GrammarCompiler(tiny.tokenizer(), 301)
    for wanted in (StructuredOutputs(regex="[a-f]{3}"), StructuredOutputs(choice=["ab", "Äpfel"])):
        assert checked.matcher(wanted).mask() == plain.matcher(wanted).mask()
