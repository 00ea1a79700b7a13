"""The order in which engines on one device allocate their caches: in turn, once all have loaded their weights.

So the memory that is free after loading is divided equally. Of n engines on a GPU, number k (from 0) takes 1/(n - k) of
the free memory in its turn; on a CPU, whose memory is taken only when a page is first written, each takes 1/n. An
engine that is restarted later has its turn immediately.
"""

import asyncio
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class StartOrder:
    """The turns of ``count`` engines on one device."""

    def __init__(self, count: int):
        self._loading = set(range(count))
        self._loaded = asyncio.Event()
        self._allocated = [asyncio.Event() for _ in range(count)]

    async def wait(self, position: int) -> None:
        """Engine ``position`` has loaded its weights: wait for its turn."""
        self._loading.discard(position)
        if not self._loading:
            self._loaded.set()
        await self._loaded.wait()
        if position:
            await self._allocated[position - 1].wait()

    def end(self, position: int) -> None:
        """Engine ``position`` has allocated its cache."""
        self._allocated[position].set()


class Turn(NamedTuple):
    """One engine's place in the order."""

    order: StartOrder
    position: int

    async def wait(self) -> None:
        """Wait until the engine, which has loaded its weights, may allocate."""
        await self.order.wait(self.position)

    def end(self) -> None:
        """Let the next one allocate."""
        self.order.end(self.position)


def start_turns(devices: Sequence[Hashable]) -> list[Turn]:
    """A turn for each engine, given the device that it is on."""
    orders = {device: StartOrder(count) for device, count in Counter(devices).items()}
    seen = Counter[Hashable]()
    turns: list[Turn] = []
    for device in devices:
        turns.append(Turn(orders[device], seen[device]))
        seen[device] += 1
    return turns
