"""The queue of a pooling engine: the texts of all requests, one text of each request in turn.

So a request with 2,048 texts delays another one by a pass, not by all its passes. Pure Python: no tensors, no clock.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

from colonnade.serve.pooling_request import PoolingItem


class PoolingQueue:
    """Texts that wait, by request; requests take turns in order of arrival."""

    def __init__(self):
        self._requests: OrderedDict[str, deque[PoolingItem]] = OrderedDict()

    def __len__(self) -> int:
        """Requests with texts that wait."""
        return len(self._requests)

    def add(self, request: str, items: Iterable[PoolingItem]) -> None:
        """Queue the texts of ``request``, at least one."""
        self._requests[request] = deque(items)

    def take(self, token_budget: int, most: int) -> list[PoolingItem]:
        """At most ``most`` texts with at most ``token_budget`` tokens, but at least one if any waits.

        A text that does not fit when it is next in turn is the first of the next call, so that none waits forever.
        """
        taken: list[PoolingItem] = []
        while self._requests and len(taken) < most:
            request, items = next(iter(self._requests.items()))
            if taken and len(items[0].tokens) > token_budget:
                break
            item = items.popleft()
            token_budget -= len(item.tokens)
            taken.append(item)
            if items:
                self._requests.move_to_end(request)
            else:
                del self._requests[request]
        return taken

    def cancel(self, request: str) -> None:
        """Drop the texts of ``request`` that wait."""
        self._requests.pop(request, None)
