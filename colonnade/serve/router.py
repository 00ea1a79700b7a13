"""Chooses a replica for each request: the one that has most of its prompt in the prefix cache, otherwise the least
loaded.

    prompt -> hashes of its 256-byte blocks -> the replica that was sent most of them before      prefix routing
                                            -> the replica with the fewest requests               else

A prefix counts if it covers at least :data:`MIN_PREFIX_SHARE` of the prompt, and not while the load is uneven. The
router tracks only what it has sent, not what the replicas still have cached: an LRU list approximates each cache.

Pure Python without a clock, a socket or a model.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

BLOCK_BYTES = 256
"""Unit in which prompts are compared [bytes]."""

MAX_BLOCKS = 1024
"""Blocks of a prompt that are hashed; what follows them is not compared."""

MAX_REMEMBERED_BLOCKS = 1 << 15
"""Blocks remembered for each replica, the least recently used ones dropped first."""

MIN_PREFIX_SHARE = 0.3
"""A known prefix determines the replica if it covers this share of the prompt."""

MAX_EVEN_LOAD = 8
MAX_LOAD_RATIO = 1.5
"""The load is uneven if the busiest replica has more than 8 requests, and more than 1.5 times the least busy one's."""


def text_bytes(text: str | Sequence[int] | Mapping[str, Any]) -> bytes:
    """The bytes by which a prompt is compared: a text, token ids, or a message of a chat."""
    if isinstance(text, str):
        return text.encode(errors="surrogatepass")
    if isinstance(text, Mapping):
        return f"{text.get('role')}\0{text.get('content')}\0".encode(errors="surrogatepass")
    return array("q", text[: MAX_BLOCKS * BLOCK_BYTES]).tobytes()


def block_hashes(prompt: bytes) -> list[bytes]:
    """A hash for each full block of ``prompt``, of everything up to its end."""
    hashes, digest = list[bytes](), b""
    for start in range(0, min(len(prompt) - BLOCK_BYTES + 1, MAX_BLOCKS * BLOCK_BYTES), BLOCK_BYTES):
        digest = hashlib.blake2b(digest + prompt[start : start + BLOCK_BYTES], digest_size=16).digest()
        hashes.append(digest)
    return hashes


class Router:
    """Loads and known prefixes of ``count`` replicas, which are numbered from 0."""

    def __init__(self, count: int):
        self.loads = [0] * count
        """Requests that each replica has."""
        self.prefix_requests = 0
        """Requests that were sent where their prefix was known."""
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]
        self._chosen = [0] * count
        """The number of the last request of each replica."""
        self._requests = 0

    def choose(self, prompt: bytes, up: Collection[int]) -> int:
        """The replica of ``up`` for a request with this prompt, which counts as its load until :meth:`end`."""
        hashes = block_hashes(prompt)
        least = min(up, key=lambda i: (self.loads[i], self._chosen[i]))
        blocks = {i: sum(1 for _ in takewhile(self._known[i].__contains__, hashes)) for i in up}
        best = max(up, key=lambda i: (blocks[i], -self.loads[i], -self._chosen[i]))
        known = blocks[best] > 0 and blocks[best] * BLOCK_BYTES >= MIN_PREFIX_SHARE * len(prompt)
        if known and not self._uneven(up):
            self.prefix_requests += 1
            least = best
        self._requests += 1
        self._chosen[least] = self._requests
        self.loads[least] += 1
        self._remember(least, hashes)
        return least

    def end(self, replica: int) -> None:
        """A request of ``replica`` has ended."""
        self.loads[replica] -= 1

    def clear(self, replica: int) -> None:
        """The cache of ``replica`` is empty: it has been restarted, or reset."""
        self._known[replica].clear()

    def _uneven(self, up: Collection[int]) -> bool:
        busiest = max(self.loads[i] for i in up)
        return busiest > MAX_EVEN_LOAD and busiest > MAX_LOAD_RATIO * min(self.loads[i] for i in up)

    def _remember(self, replica: int, hashes: Sequence[bytes]) -> None:
        known = self._known[replica]
        for each in reversed(hashes):  # a prefix is dropped after everything that it begins
            known[each] = None
            known.move_to_end(each)
        while len(known) > MAX_REMEMBERED_BLOCKS:
            known.popitem(last=False)
