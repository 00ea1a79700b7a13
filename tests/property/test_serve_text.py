"""Stop strings and messages between ranks, under any cutting."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from colonnade.serve.model_inputs import pack_work, unpack_work
from colonnade.serve.sampling_params import SampleArgs
from colonnade.serve.scheduler import Slice, Work
from colonnade.serve.text_stream import StopFilter

letters = st.text("abc", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def reference(text: str, stops: list[str]) -> str:
    """Read letter by letter; at the first letter that completes a stop string, cut before the longest such one."""
    for end in range(len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@given(letters, stops, st.lists(st.integers(0, 30), max_size=8))
def test_any_cutting_gives_the_same_text(text: str, stops: list[str], cuts: list[int]):
    filter_ = StopFilter(stops)
    edges = [0, *sorted(cuts), len(text)]
    shown = ""
    for a, b in pairwise(edges):
        shown += filter_.push(text[a:b])
        assert reference(text, stops).startswith(shown), "showed what a stop string takes away"
    assert filter_.stopped == any(s in text for s in stops)
    assert shown + filter_.flush() == reference(text, stops)


@given(letters, stops)
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str]):
    filter_ = StopFilter(stops)
    shown = "".join(map(filter_.push, text))
    if not filter_.stopped:
        held = text[len(shown) :]
        assert held == "" or any(s.startswith(held) and s != held for s in stops)


numbers, fractions = st.integers(0, 2**40), st.floats(0, 1e300)
slices = st.builds(
    Slice,
    start=numbers,
    tokens=st.lists(numbers, min_size=1, max_size=5).map(tuple),
    pages=st.lists(numbers, min_size=1, max_size=5).map(tuple),
    sample_args=st.none()
    | st.builds(SampleArgs, fractions, numbers, fractions, fractions, numbers.map(int.__neg__), numbers),
)


@given(st.lists(slices, max_size=5))
def test_work_survives_the_wire(pieces: list[Slice]):
    assert unpack_work(pack_work(Work(tuple(pieces)))) == Work(tuple(pieces))
