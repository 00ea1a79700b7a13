"""Which replica gets a request."""

import random
from array import array

import pytest

from colonnade.serve import router
from colonnade.serve.router import BLOCK_BYTES, MAX_BLOCKS, Router, block_hashes, text_bytes

LONG = b"".join(b"%08d" % i for i in range(256))
"""8 blocks."""


def test_least_loaded_replica_is_chosen_and_ties_go_round():
    it = Router(3)
    assert [it.choose(b"short", range(3)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    it.end(1)
    assert it.choose(b"short", range(3)) == 1
    it.end(0)
    assert it.choose(b"short", [1, 2]) in (1, 2), "replica 0 is down"
    assert sum(it.loads) == 6


def test_a_known_prefix_decides_if_it_covers_enough():
    it = Router(2)
    assert it.choose(LONG, range(2)) == 0
    assert it.choose(b"other", range(2)) == 1
    it.end(0)
    it.end(1)
    assert it.choose(b"x", range(2)) == 0  # the least recently chosen; now 1 is less loaded
    share = LONG[: 3 * BLOCK_BYTES]
    ten = share + bytes(7 * BLOCK_BYTES)
    assert it.choose(ten, range(2)) == 0 and it.prefix_requests == 1, "3 of 10 blocks"
    eleven = share + b"y" * 8 * BLOCK_BYTES
    assert it.choose(eleven, range(2)) == 1 and it.prefix_requests == 1, "3 of 11 blocks"
    assert it.choose(b"-" + LONG, range(2)) == 1 and it.prefix_requests == 1, "the beginning is another"


def test_the_longest_prefix_wins():
    it = Router(2)
    assert it.choose(LONG[: 4 * BLOCK_BYTES], range(2)) == 0
    assert it.choose(LONG[: 4 * BLOCK_BYTES] + b"z" * 40 * BLOCK_BYTES, range(2)) == 1
    assert it.choose(LONG[: 4 * BLOCK_BYTES] + b"z" * BLOCK_BYTES, range(2)) == 1


@pytest.mark.parametrize(("busy", "idle", "chosen"), [(8, 0, 0), (9, 6, 0), (9, 5, 1), (12, 8, 0), (13, 8, 1)])
def test_uneven_load_beats_a_prefix(busy: int, idle: int, chosen: int):
    it = Router(2)
    it.choose(LONG, [0])
    it.loads = [busy, idle]
    assert it.choose(LONG, range(2)) == chosen


def test_a_restarted_replica_has_no_prefix():
    it = Router(2)
    assert it.choose(LONG, range(2)) == 0
    it.clear(0)
    assert it.choose(LONG, range(2)) == 1


def test_blocks_are_bounded_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    assert len(block_hashes(bytes((MAX_BLOCKS + 9) * BLOCK_BYTES))) == MAX_BLOCKS
    assert block_hashes(bytes(BLOCK_BYTES - 1)) == [] and len(block_hashes(bytes(BLOCK_BYTES))) == 1
    monkeypatch.setattr(router, "MAX_REMEMBERED_BLOCKS", 10)
    it, draw = Router(1), random.Random(0)
    texts = [draw.randbytes(4 * BLOCK_BYTES) for _ in range(5)]
    for text in texts:
        it.choose(text, [0])
    (known,) = it._known
    assert len(known) == 10
    assert set(block_hashes(texts[-1])) <= set(known) and not set(block_hashes(texts[0])) & set(known)
    assert len(set(block_hashes(texts[2])[:2]) & set(known)) == 2, "its beginning outlives its end"


def test_prompts_of_each_kind_have_bytes():
    assert text_bytes("Äpfel \ud83d") == "Äpfel ".encode() + b"\xed\xa0\xbd"
    assert text_bytes([1, 2]) == array("q", [1, 2]).tobytes()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    assert text_bytes(messages[0]) != text_bytes(messages[1])
