"""Grammars of tool calls admit exactly the format, and the parser splits an answer wherever it is cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.errors import RequestError
from colonnade.serve.grammar import GrammarCompiler
from colonnade.serve.structured_outputs import StructuredOutputs
from colonnade.serve.tool_calls import FORMATS, ToolCallParser, ToolNotation, ToolOptions, detect_tool_format
from tests.serve import tiny

ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}, "note": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = [("add", {"a": 3, "note": 'br{ce "]}\\'}), ("now", {}), ("add", {"a": -1})]


def spelled(name: str, calls: list[tuple[str, Any]], text: str = "") -> str:
    """An answer as models write it."""
    key = FORMATS[name].arguments
    objects = [json.dumps({"name": called, key: arguments}) for called, arguments in calls]
    if not objects:
        return text
    if name == "hermes":
        return text + "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    return "; ".join(objects) if name == "llama3" else f"{text}[TOOL_CALLS] [{', '.join(objects)}]"


def accepted(options: ToolOptions, answer: str, tools: bool = False) -> tuple[bool, bool]:
    """Whether every token of the answer is allowed, and whether it may end there."""
    tokenizer = tiny.tokenizer(tools=tools)
    matcher = GrammarCompiler(tokenizer, 301).matcher(StructuredOutputs(grammar=options.grammar()))
    for token in tokenizer.encode(answer):
        if not matcher.mask()[token // 8] >> token % 8 & 1:
            return False, False
        matcher.accept(token)
    return True, bool(matcher.mask()[0] & 1) or matcher.finished


def notation(name: str, special: bool = False) -> ToolNotation:
    return ToolNotation(FORMATS[name], True, {"[TOOL_CALLS]": 300} if special else {})


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_grammars_admit_calls(name: str, special: bool, required: bool, parallel: bool):
    if special and name != "mistral":
        special = False
    options = ToolOptions(notation=notation(name, special), tools=TOOLS, required=required, parallel=parallel)

    def allowed(answer: str) -> tuple[bool, bool]:
        return accepted(options, answer, tools=special)

    assert allowed(spelled(name, CALLS[:1])) == (True, True)
    assert allowed(spelled(name, CALLS)) == ((True, True) if parallel else (False, False))
    assert allowed("Hello <tool") == ((False, False) if required else (True, True))
    text = "Hello. " if name != "llama3" else ""
    assert allowed(spelled(name, CALLS[1:2], text)) == ((True, True) if not required or not text else (False, False))
    assert allowed(spelled(name, CALLS[:1])[:-9]) == (True, False), "a call is completed"
    for bad in (("add", {"a": "3"}), ("add", {}), ("add", {"a": 1, "b": 2}), ("sub", {"a": 3})):
        assert allowed(spelled(name, [bad])) == (False, False)


@given(
    name=st.sampled_from(sorted(FORMATS)),
    calls=st.lists(
        st.tuples(
            st.sampled_from(["add", "now"]), st.dictionaries(st.text(max_size=3), st.text('{}[]"\\ a', max_size=5))
        ),
        max_size=3,
    ),
    text=st.sampled_from(["", "Hi", "a < b\n", "<tool_", " \n"]),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_parsing_does_not_depend_on_chunking(name: str, calls: list, text: str, cuts: list[int]):
    if name == "llama3" and calls:
        text = ""
    answer = spelled(name, calls, text)
    edges = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    parser = ToolCallParser(FORMATS[name])
    parts = [parser.push(answer[a:b]) for a, b in pairwise(edges)] + [parser.finish()]
    found: list[list[str]] = []
    for delta in (delta for part in parts for delta in part.calls):
        if delta.name is not None:
            assert delta.index == len(found) and delta.id
            found.append([delta.name, ""])
        found[delta.index][1] += delta.arguments
    assert [(called, json.loads(arguments)) for called, arguments in found] == calls
    assert "".join(part.content for part in parts) == (text.rstrip() if calls else text)
    assert parser.calls == len(calls)


def test_text_that_follows_calls_is_content():
    parser = ToolCallParser(FORMATS["hermes"])
    first = parser.push(spelled("hermes", CALLS[:1], "Before.\n") + "\nAfter")
    assert (first.content, parser.finish().content) == ("Before.\nAfter", "")


def test_an_incomplete_call_is_no_text():
    parser = ToolCallParser(FORMATS["hermes"])
    parsed = parser.push('Well. <tool_call>\n{"name": "ad')
    assert parsed.content == "Well." and not parsed.calls
    assert parser.finish().content == "" and parser.calls == 0


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{{ tools }}<tool_call>", "hermes"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ('{{ tools }}{"name": "f", "parameters": {}}', "llama3"),
        ("{{ tools }}", None),
    ],
)
def test_formats_are_detected(template: str | None, expected: str | None):
    assert detect_tool_format(template) == expected


def test_the_notation_of_a_tokenizer():
    found = ToolNotation.of(tiny.tokenizer(tools=True))
    assert (found.format.name, found.in_template, found.special_ids) == ("mistral", True, {"[TOOL_CALLS]": 300})
    assert ToolNotation.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert not ToolNotation.of(tiny.tokenizer()).in_template
    assert ToolNotation.of(tiny.tokenizer(), "llama3")[:2] == (FORMATS["llama3"], True)


def test_special_tokens_in_tools_and_calls_stay_text():
    tokenizer = tiny.tokenizer(tools=True)
    tools = [{"type": "function", "function": {"name": "f", "description": "[TOOL_CALLS]<|end|>"}}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "<|end|>"}}}
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    ids = tokenizer.encode_chat(messages, tools=tools, mood="<|end|>")
    assert 0 not in ids and ids.count(300) == 1, "only the template's own special token"
    assert "[TOOL_CALLS]<|end|>" in tokenizer.decode(ids) and tokenizer.decode(ids).endswith("<|assistant|><|end|>")


def test_a_last_message_is_continued():
    tokenizer = tiny.tokenizer()
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well <|end|>"},
    ]
    ids = tokenizer.encode_chat(messages, continue_last=True)
    assert tokenizer.decode(ids) == "<|user|>Hi\n<|assistant|>Well <|end|>" and 0 not in ids
    assert messages[1]["content"] == "Well <|end|>"
    hidden = tiny.Tokenizer(tokenizer._core, eos_ids=(0,), chat_template="{{ messages[0].content }}")
    with pytest.raises(RequestError, match="does not show the last message"):
        hidden.encode_chat(messages, continue_last=True)
