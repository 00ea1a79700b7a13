"""Stop strings and messages between ranks, for any split of the text."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from colonnade.serve.model_inputs import pack_work, unpack_work
from colonnade.serve.sample_args import LogitsChanges, SampleArgs
from colonnade.serve.text_stream import StopFilter
from colonnade.serve.work import Slice, Work

letters = st.text("abc", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def reference(text: str, stops: list[str]) -> str:
    """Read character by character; at the first one that completes a stop string, cut before the longest
    such string.
    """
    for end in range(len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@given(letters, stops, st.lists(st.integers(0, 30), max_size=8))
def test_stop_strings_do_not_depend_on_chunking(text: str, stops: list[str], cuts: list[int]):
    filter_ = StopFilter(stops)
    edges = [0, *sorted(cuts), len(text)]
    shown = ""
    for a, b in pairwise(edges):
        shown += filter_.push(text[a:b])
        assert reference(text, stops).startswith(shown), "showed text that a stop string removes"
    assert filter_.stopped == any(s in text for s in stops)
    assert shown + filter_.flush() == reference(text, stops)


@given(letters, stops)
def test_only_possible_stop_prefixes_are_held_back(text: str, stops: list[str]):
    filter_ = StopFilter(stops)
    shown = "".join(map(filter_.push, text))
    if not filter_.stopped:
        held_back = text[len(shown) :]
        assert held_back == "" or any(s.startswith(held_back) and s != held_back for s in stops)


whole_numbers, fractions = st.integers(0, 2**40), st.floats(0, 1e300)
entries = st.lists(st.tuples(whole_numbers, fractions, st.floats(-1e9, 1e9)), max_size=4)
changes = st.builds(
    lambda rows, mask: LogitsChanges(*(tuple(row[i] for row in rows) for i in range(3)), mask),  # type: ignore[arg-type]
    entries,
    st.none() | st.binary(min_size=1, max_size=9),
)
slices = st.builds(
    Slice,
    start=whole_numbers,
    tokens=st.lists(whole_numbers, min_size=1, max_size=5).map(tuple),
    pages=st.lists(whole_numbers, min_size=1, max_size=5).map(tuple),
    sample_args=st.none()
    | st.builds(
        SampleArgs,
        fractions,
        whole_numbers,
        fractions,
        fractions,
        whole_numbers.map(int.__neg__),
        whole_numbers,
        st.integers(-1, 20),
        st.none() | changes,
    ),
    targets=st.lists(st.integers(-1, 2**40), max_size=5).map(tuple),
    alternatives=st.integers(0, 20),
)


@given(st.lists(slices, max_size=5))
def test_work_round_trips_through_encoding(pieces: list[Slice]):
    assert unpack_work(*pack_work(Work(tuple(pieces)))) == Work(tuple(pieces))
