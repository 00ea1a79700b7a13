"""Which tokens of a conversation count, and refused rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colonnade.data import Tokenizer
from colonnade.data.chat_template import Role
from colonnade.errors import DataError
from colonnade.model import IGNORE
from colonnade.serve.api.chat_schemas import ChatMessage
from colonnade.tune.chats import (
    Conversation,
    Conversations,
    conversation,
    encode_prompt,
    fit_conversation,
    preference,
    read_rows,
)
from colonnade.tune.packing import pack_rows
from tests import tokens

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
STRIPS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END = "<|endoftext|>"


def tokenizer(template: str | None = PLAIN) -> Tokenizer:
    return Tokenizer(tokens.byte_level()._core, 0, (0,), template)


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TALK = [
    said("system", "x"),
    said("user", "hi"),
    said("assistant", "hello"),
    said("user", "é?"),
    said("assistant", "yes"),
]


def counted(row: Conversation, of: Tokenizer) -> str:
    return of.decode([token for token, counts in zip(*row, strict=True) if counts], skip_special=False)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_what_the_assistant_says_counts(template: str) -> None:
    of = tokenizer(template)
    row = conversation({"messages": TALK}, of)
    assert counted(row, of) == f"hello{END}yes{END}"
    assert row.tokens == of.encode_chat(TALK, add_generation_prompt=False)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_messages_that_are_not_trained(template: str) -> None:
    of = tokenizer(template)
    talk = [*TALK[:2], said("assistant", "hello", train=False), *TALK[3:]]
    assert counted(conversation({"messages": talk}, of), of) == f"yes{END}"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_spelled_special_token_stays_text(template: str) -> None:
    of = tokenizer(template)
    talk = [said("user", f"say {END}"), said("assistant", f"a {END} b")]
    row = conversation({"messages": talk}, of)
    assert counted(row, of) == f"a {END} b{END}"
    assert row.tokens.count(0) == 2
    assert [counts for token, counts in zip(*row, strict=True) if token == 0] == [False, True]


def test_prompts_and_completions() -> None:
    of = tokenizer()
    row = conversation({"prompt": "2 + 2 =", "completion": " 4"}, of)
    assert counted(row, of) == f" 4{END}"
    assert encode_prompt("2 + 2 =", of) == row.tokens[: -len(of.encode(" 4")) - 1]
    row = conversation({"prompt": TALK[:2], "completion": TALK[2:3]}, of)
    assert counted(row, of) == f"hello{END}"
    assert encode_prompt(TALK[:2], of) == row.tokens[: row.counts.index(True)]


def test_preferences() -> None:
    of = tokenizer()
    pair = preference({"prompt": "a", "chosen": "b", "rejected": "c"}, of)
    assert [counted(side, of) for side in pair] == [f"b{END}", f"c{END}"]
    worse = [*TALK[:4], said("assistant", "no")]
    pair = preference({"chosen": TALK, "rejected": worse}, of)  # the answer that both share does not count
    assert [counted(side, of) for side in pair] == [f"yes{END}", f"no{END}"]


LISTED = "'system', 'developer', 'user', 'assistant' or 'tool'"
HOSTILE: list[tuple[Any, str]] = [
    ({}, "nothing"),
    ({"text": "x"}, "'text'"),
    ({"prompt": "x", "chosen": "y", "rejected": "z"}, "use --method dpo"),
    ({"messages": []}, "'messages' is an empty list; write a list of messages"),
    ({"messages": "hi"}, "'messages' is a string; write a list of messages"),
    ({"messages": ["hi"]}, "message 1 of 'messages' is a string; write an object"),
    ({"messages": [{"content": "x"}]}, f"message 1 of 'messages' has no 'role', but 'content'; write {LISTED}"),
    ({"messages": [TALK[1], said("bot", "x")]}, f"message 2 of 'messages' has the role 'bot'; write {LISTED}"),
    ({"messages": [said("user", "x"), {"role": "assistant"}]}, "message 2 .* 'assistant' and has no 'content'; write"),
    ({"prompt": [{"role": "user"}], "completion": TALK}, "message 1 of 'prompt' is of role 'user' and has no"),
    ({"messages": [{"role": "user", "content": None}]}, "has 'content' null; write text"),
    ({"messages": [{"role": "user", "content": 3}]}, r"'content' is a number \(3\); write text"),
    ({"messages": [said("assistant", "x", train="no")]}, "message 1 .*'train': 'no'; write true or false"),
    ({"messages": TALK[:2]}, "no token to train on"),
    ({"messages": [said("assistant", "x", train=False)]}, "no token to train on"),
    (
        {"prompt": "x", "completion": TALK},
        "'prompt' is a string and 'completion' a list of messages; write both in the",
    ),
    (
        {"prompt": TALK, "completion": "x"},
        "'completion' is a string and 'prompt' a list of messages; write both in the",
    ),
    ({"prompt": 3, "completion": "a"}, r"'prompt' is a number \(3\); write a string or a list of messages"),
    ({"prompt": "a", "completion": None}, "'completion' is null; write a string or a list of messages"),
    ({"prompt": True, "completion": "a"}, "'prompt' is true; write"),
    ({"prompt": {"role": "user"}, "completion": "a"}, "'prompt' is an object; write"),
    ({"messages": [said("user", "\ud800"), said("assistant", "x")]}, "surrogate"),
]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(("row", "message"), HOSTILE)
def test_bad_rows_are_named(row: Any, message: str, template: str) -> None:
    with pytest.raises(DataError, match=f"row 7.*{message}"):
        conversation(row, tokenizer(template), "row 7")


def test_prompts_of_a_wrong_form_are_named() -> None:
    with pytest.raises(DataError, match=r"row 7: 'prompt' is a number \(2.5\); write a string or a list of messages"):
        encode_prompt(2.5, tokenizer(), "row 7")
    with pytest.raises(DataError, match="row 7: 'rejected' is a string; write a list of messages"):
        preference({"chosen": TALK, "rejected": "no"}, tokenizer(), "row 7")
    with pytest.raises(DataError, match="row 7 lacks 'chosen' or 'rejected'"):
        preference({"prompt": "a", "completion": "b"}, tokenizer(), "row 7")
    with pytest.raises(DataError, match="row 7 has identical tokens in 'chosen' and 'rejected'"):
        preference({"prompt": "a", "chosen": "b", "rejected": "b"}, tokenizer(), "row 7")


def test_messages_reach_the_template_as_the_server_sends_them() -> None:
    reads_calls = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %})"
        "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"at": 3}'}}
    parts = [{"type": "text", "text": "where"}, {"type": "text", "text": "?"}]
    sent = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    of = tokenizer(reads_calls)
    row = conversation({"messages": sent}, of)
    assert counted(row, of) == f"find(at=3){END}"
    served = [ChatMessage.model_validate(message).for_template() for message in sent]
    assert row.tokens == of.encode_chat(served, add_generation_prompt=False)
    as_object = {**call, "function": {"name": "find", "arguments": {"at": 3}}}
    assert conversation({"messages": [sent[0], {**sent[1], "tool_calls": [as_object]}]}, of) == row
    for calls, message in (
        ([{**call, "function": {"name": "find", "arguments": "{"}}], "calls 'find' with arguments that are not a JSON"),
        (
            [{**call, "function": {"name": "find", "arguments": "[1]"}}],
            "calls 'find' with arguments that are not a JSON",
        ),
        ([{"function": {}}], "has a tool call, number 1, without 'function' and its 'name'"),
        ({"a": 1}, "has 'tool_calls' that are an object; write a list"),
    ):
        with pytest.raises(DataError, match=message):
            conversation({"messages": [sent[0], {**sent[1], "tool_calls": calls}]}, of)
    with pytest.raises(DataError, match="has parts that are not text"):
        conversation({"messages": [said("user", [{"type": "image_url"}]), TALK[2]]}, of)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="which only the assistant may have"):
        conversation({"messages": [{**sent[0], "tool_calls": [call]}, TALK[2]]}, of)


def test_the_roles_are_those_of_the_server() -> None:
    assert ChatMessage.model_fields["role"].annotation == Role


def test_without_a_chat_template_rows_are_texts() -> None:
    of = tokenizer(None)
    remedy = "row 7: this model has no chat template.*write rows with strings: 'prompt' and 'completion'"
    for refused in (
        lambda: conversation({"messages": TALK}, of, "row 7"),
        lambda: conversation({"prompt": TALK[:2], "completion": TALK[2:3]}, of, "row 7"),
        lambda: preference({"chosen": TALK, "rejected": TALK[:3]}, of, "row 7"),
        lambda: encode_prompt(TALK[:2], of, "row 7"),
    ):
        with pytest.raises(DataError, match=remedy):
            refused()
    assert counted(conversation({"prompt": "a", "completion": "b"}, of), of) == f"b{END}"


def test_templates_that_change_earlier_messages_are_refused() -> None:
    one_turn = {"messages": TALK[1:3]}
    assert counted(conversation(one_turn, tokenizer(STRIPS)), tokenizer()) == f"hello{END}"
    with pytest.raises(DataError, match=r"row, message 3: .*one reply per row"):
        conversation({"messages": TALK}, tokenizer(STRIPS))
    hides = "{% for m in messages %}{{ m.content }}{% if 0 %}{% generation %}{% endgeneration %}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match="2 assistant messages, and the chat template marks 0"):
        conversation({"messages": TALK}, tokenizer(hides))


def test_bad_files(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = json.dumps({"prompt": "a", "completion": "b"})
    array = "is a JSON array; write one object per line, without the brackets and the commas between objects$"
    for text, message in (
        (good + "\n\n{", r"line 3 is not JSON: Expecting property name [^:]* at column 2; fix it: each line must be"),
        (good + '\n{"prompt": "a"\n' + good, "line 2 is not JSON: Expecting ',' delimiter at column 15; fix it"),
        (good + '\n{"prompt": "a', "line 2 is not JSON: Unterminated string starting at column 12; fix it"),
        (good + "\n" + "[" * 100_000, "line 2 is not JSON: maximum recursion"),
        (f"{good}\n[1]", "line 2 is not a JSON object, but a list; write one"),
        ("3", r"line 1 is not a JSON object, but a number \(3\); write one"),
        (f"[{good}, {good}]", array),
        (f"\n[\n{good},\n{good}\n]", array),
        (f"[{good},\n{good}]", array),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            list(read_rows(file))
    file.write_bytes(good.encode() + b'\n{"a": \xff\xfe')
    with pytest.raises(DataError, match=r"line 2 is not UTF-8: byte 0xff, byte 7 of the line; save the file as UTF-8$"):
        list(read_rows(file))
    file.write_text(good, encoding="utf-8-sig")
    assert len(list(read_rows(file))) == 1
    with pytest.raises(DataError, match="cannot read"):
        list(read_rows(tmp_path))


def test_long_conversations_are_refused_or_cut() -> None:
    row = Conversation([1, 2, 3, 4], [False, True, False, True])
    assert fit_conversation(row, 4, 9, "row", truncate=False) == row
    with pytest.raises(DataError, match="has 4 tokens, more than a sequence of 3"):
        fit_conversation(row, 3, 9, "row", truncate=False)
    assert fit_conversation(row, 3, 9, "row", truncate=True) == Conversation([1, 2, 3], [False, True, False])
    with pytest.raises(DataError, match="among the first 1"):
        fit_conversation(row, 1, 9, "row", truncate=True)
    with pytest.raises(DataError, match="has token 4"):
        fit_conversation(row, 4, 4, "row", truncate=False)


@pytest.mark.parametrize("fixed_shape", [False, True])
def test_packed_rows(fixed_shape: bool) -> None:
    data = Conversations([Conversation([5, 6, 7], [False, True, True]), Conversation([8, 9], [False, True])])
    batch = pack_rows([data.at(0), data.at(1)], 4, fixed_shape=fixed_shape)
    assert batch.tokens_T.tolist()[:5] == [5, 6, 7, 8, 9]
    assert batch.targets_T.tolist()[:5] == [6, 7, IGNORE, 9, IGNORE]
    assert batch.positions_T.tolist()[:5] == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist()[:3] == [0, 3, 5]
    if fixed_shape:
        assert len(batch.tokens_T) == 8
        assert (batch.targets_T[5:] == IGNORE).all()
        assert batch.predicted_R is None
    else:
        assert batch.predicted_R is not None
        assert batch.predicted_R.tolist() == [0, 1, 3]
    assert Conversations([]).sha256 != data.sha256
    assert np.array_equal(data.at(1)[0], [8, 9])
