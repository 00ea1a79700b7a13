"""Streaming text: whatever the tokenizer and the ids, what was pushed and flushed is what decode says at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tokens

BROKEN = "\N{REPLACEMENT CHARACTER}"


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    size = tokens.ALL[kind]().vocab_size
    anything = st.integers(0, size - 1)
    # Bytes of broken characters and control tokens are rare among all ids and frequent among these.
    low = st.integers(0, min(size - 1, 258))
    repeated = st.tuples(anything, st.integers(1, 20)).map(lambda pair: [pair[0]] * pair[1])
    return st.lists(st.one_of(anything.map(lambda i: [i]), low.map(lambda i: [i]), repeated), max_size=30).map(
        lambda runs: [i for run in runs for i in run]
    )


@pytest.mark.parametrize("kind", tokens.ALL)
@pytest.mark.parametrize("skip_special", [True, False])
@given(data=st.data())
def test_pushes_and_flush_are_the_whole_text(kind, skip_special, data):
    tokenizer = tokens.ALL[kind]()
    ids = data.draw(ids_of(kind))
    stream = tokenizer.detokenizer(skip_special)
    pushed = "".join(stream.push(i) for i in ids)
    assert pushed + stream.flush() == tokenizer.decode(ids, skip_special=skip_special)
    assert stream.flush() == ""


@given(st.text())
def test_text_comes_back_and_soon(text):
    """A byte-level stream of real text holds back three bytes at most: less than one character."""
    tokenizer = tokens.byte_level()
    ids = tokenizer.encode(text, special=False)
    stream, said = tokenizer.detokenizer(skip_special=False), ""
    for n, token in enumerate(ids, start=1):
        said += stream.push(token)
        held = tokenizer.decode(ids[:n], skip_special=False)[len(said) :]
        assert held in ("", BROKEN)
    assert said + stream.flush() == text


def test_a_stream_can_be_used_again_after_its_flush():
    tokenizer = tokens.sentencepiece()
    ids = [tokenizer.token_id(piece) for piece in ("▁hello", "<0xE6>", "<0x9D>")]
    stream = tokenizer.detokenizer()
    for _ in range(2):
        assert [stream.push(i) for i in ids] == ["hello", "", ""]
        assert stream.flush() == BROKEN * 2  # SentencePiece's decoder writes one for each byte


def test_control_tokens_are_silent_unless_asked_for():
    tokenizer = tokens.byte_level()
    end = tokenizer.eos_ids[0]
    euro = tokenizer.encode("€", special=False)
    assert len(euro) > 1, "the test needs a character of several tokens"
    quiet, loud = tokenizer.detokenizer(), tokenizer.detokenizer(skip_special=False)
    # Inside a character: the bytes before and after belong together when the control token is left out.
    ids = [euro[0], end, *euro[1:]]
    assert "".join(map(quiet.push, ids)) + quiet.flush() == "€"
    assert "<|endoftext|>" in "".join(map(loud.push, ids)) + loud.flush()


def test_long_streams_keep_a_short_memory():
    tokenizer = tokens.byte_level()
    stream = tokenizer.detokenizer()
    for token in tokenizer.encode(tokens.TEXT * 20, special=False):
        stream.push(token)
        assert len(stream._window) <= 24


@pytest.mark.parametrize("stuck", ["ÿ", "âĤ", "ðŁ", "Ģ"])
def test_a_model_stuck_on_broken_bytes_costs_no_more_each_time(stuck):
    tokenizer = tokens.byte_level()
    run = [tokenizer.token_id(piece) for piece in stuck]
    stream, ids, said = tokenizer.detokenizer(), [], ""
    for token in run * 200:
        ids.append(token)
        said += stream.push(token)
        assert len(stream._window) < 48
    assert said + stream.flush() == tokenizer.decode(ids)
