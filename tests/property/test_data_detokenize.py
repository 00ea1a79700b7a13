"""Streaming detokenization: for any ids, the pushed and flushed text equals decode's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data import Tokenizer
from colonnade.data.detokenize import ByteDetokenizer, Detokenizer
from tests import tokens

BROKEN = "\N{REPLACEMENT CHARACTER}"


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    size = tokens.ALL[kind]().vocab_size
    any_id = st.integers(0, size - 1)
    # Bytes of incomplete characters and control tokens are rare among all ids but frequent among these.
    low = st.integers(0, min(size - 1, 258))
    repeated = st.tuples(any_id, st.integers(1, 20)).map(lambda pair: [pair[0]] * pair[1])
    return st.lists(st.one_of(any_id.map(lambda i: [i]), low.map(lambda i: [i]), repeated), max_size=30).map(
        lambda runs: [i for run in runs for i in run]
    )


def windows(tokenizer: Tokenizer) -> Detokenizer:
    """The detokenizer for any vocabulary."""
    return Detokenizer(tokenizer.decode, silent=tokenizer.special_ids)


@pytest.mark.sample(3)
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


@given(data=st.data())
def test_windows_give_the_same_text_as_bytes(data):
    tokenizer = tokens.byte_level()
    ids = data.draw(ids_of("byte_level"))
    by_bytes, by_windows = tokenizer.detokenizer(), windows(tokenizer)
    assert isinstance(by_bytes, ByteDetokenizer)
    texts = ["".join(map(each.push, ids)) + each.flush() for each in (by_bytes, by_windows)]
    assert texts[0] == texts[1]


@given(st.text())
def test_stream_holds_back_less_than_one_character(text):
    """A byte-level stream of real text holds back at most three bytes: less than one character."""
    tokenizer = tokens.byte_level()
    ids = tokenizer.encode(text, special=False)
    stream, shown = tokenizer.detokenizer(skip_special=False), ""
    for n, token in enumerate(ids, start=1):
        shown += stream.push(token)
        held_back = tokenizer.decode(ids[:n], skip_special=False)[len(shown) :]
        assert held_back in ("", BROKEN)
    assert shown + stream.flush() == text


def test_stream_is_reusable_after_a_flush():
    tokenizer = tokens.sentencepiece()
    ids = [tokenizer.token_id(piece) for piece in ("▁hello", "<0xE6>", "<0x9D>")]
    stream = tokenizer.detokenizer()
    for _ in range(2):
        assert [stream.push(i) for i in ids] == ["hello", "", ""]
        assert stream.flush() == BROKEN * 2  # SentencePiece's decoder writes one per byte


def test_control_tokens_are_skipped_by_default():
    tokenizer = tokens.byte_level()
    end = tokenizer.eos_ids[0]
    euro = tokenizer.encode("€", special=False)
    assert len(euro) > 1, "the test needs a character of several tokens"
    skipping, showing = tokenizer.detokenizer(), tokenizer.detokenizer(skip_special=False)
    # Inside a character: its bytes join when the control token is skipped.
    ids = [euro[0], end, *euro[1:]]
    assert "".join(map(skipping.push, ids)) + skipping.flush() == "€"
    assert "<|endoftext|>" in "".join(map(showing.push, ids)) + showing.flush()


def test_long_streams_use_bounded_memory():
    tokenizer = tokens.byte_level()
    stream = windows(tokenizer)
    for token in tokenizer.encode(tokens.TEXT * 20, special=False):
        stream.push(token)
        assert len(stream._window) <= 24


@pytest.mark.parametrize("stuck", ["ÿ", "âĤ", "ðŁ", "Ģ"])
def test_repeated_broken_bytes_have_constant_cost(stuck):
    tokenizer = tokens.byte_level()
    run = [tokenizer.token_id(piece) for piece in stuck]
    stream, ids, shown = windows(tokenizer), [], ""
    for token in run * 200:
        ids.append(token)
        shown += stream.push(token)
        assert len(stream._window) < 48
    assert shown + stream.flush() == tokenizer.decode(ids)
