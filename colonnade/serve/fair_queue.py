"""The queue of waiting requests: by priority class, and within a class clients in turn, weighted by tokens.

Start-time fair queueing (Goyal 1996, §2), with clients as flows and tokens as packet lengths. In each class:

    start        = max(virtual time, finish of the client's last admitted request)
    finish       = start + tokens of the prompt + tokens that may be generated
    virtual time = start of the last admitted request (after a rise, see below: the smallest start that waits)

The client whose first request has the smallest start comes first. While two clients both have requests waiting, the
tokens admitted for them differ by at most the largest request of each, however many requests either has sent. Requests
of one client are first come, first served. We differ from the paper in three points. A start is computed when a request
becomes the first of its client, not on arrival, so that cancelled requests cost nothing. Tokens that a request did not
generate are refunded when it ends. And a request that has been the first of its client for :data:`RISE_S` rises one
class, again and again, so that no request starves behind better classes or new clients; it stays ahead of the requests
that were submitted in that class. Time spent behind other requests of the same client does not count; otherwise a
client with a long backlog would overtake all others after :data:`RISE_S`.

A full queue is shared equally: a client that has fewer requests in it than its share may still add one, and the client
that has most loses its newest (longest queue drop; Suter et al. 1998, "Design considerations for supporting TCP with
per-flow queueing"). Alone a client may fill all of it.

Preempted requests come before all others, in the order in which they were admitted; they are not charged again.

Pure Python without a clock: the caller passes the time.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from colonnade.serve.request import Request

RISE_S = 30.0
"""Time as the first of a client after which a request rises one class [s]."""

UPDATE_S = 1.0
"""Interval at which waiting times are compared with :data:`RISE_S` [s]."""

FORGET_S = 60.0
"""A client without waiting requests starts from zero after this time [s]."""


def cost_tokens(request: Request) -> int:
    """The cost charged to a client for ``request`` when it is admitted [tokens]."""
    return len(request.prompt) + request.limit_tokens


_Entry = tuple[int, int, int, int, "_Flow"]


@dataclass(eq=False, slots=True)
class _Flow:
    """The waiting requests of one client in one class."""

    requests: OrderedDict[Request, int] = field(default_factory=OrderedDict)
    """With their numbers in order of arrival."""
    start: int = 0
    """Start of the first request."""
    finish: int = 0
    """Finish of the last admitted request."""
    since_s: float = 0.0
    """When the first request became the first, or the last one left."""
    rises: int = 0
    """Classes that the first request has risen."""
    entry: _Entry | None = None
    """Its entry in the heap; others are out of date."""


@dataclass(slots=True)
class _Class:
    virtual_time: int = 0
    waiting: int = 0
    flows: dict[str, _Flow] = field(default_factory=dict)
    """By client; some have no requests, but a finish."""


class FairQueue:
    """Waiting requests; all operations take O(log clients), :meth:`advance` O(clients) once in :data:`UPDATE_S`."""

    def __init__(self):
        self._preempted: OrderedDict[Request, None] = OrderedDict()
        self._classes: dict[int, _Class] = {}
        """By priority; only those with waiting requests."""
        self._heap: list[_Entry] = []
        """(class, -rises, start, number, line) of the first request of each line."""
        self._counts = Counter[str]()
        """Requests of each client that wait for their first admission; without clients that have none."""
        self._size = self._number = 0
        self._now_s = self._updated_s = 0.0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Preempted requests, then those of each client in order of arrival."""
        yield from self._preempted
        for group in self._classes.values():
            for flow in group.flows.values():
                yield from flow.requests

    @property
    def first(self) -> Request | None:
        """The request to admit next."""
        if self._preempted:
            return next(iter(self._preempted))
        flow = self._first_flow()
        return None if flow is None else next(iter(flow.requests))

    def advance(self, now_s: float) -> None:
        """Raise the priority of requests that have waited long enough at ``now_s``, on any monotonic clock."""
        self._now_s = now_s
        if now_s - self._updated_s < UPDATE_S:
            return
        self._updated_s, self._heap = now_s, []
        for priority, group in self._classes.items():
            for client, flow in list(group.flows.items()):
                if flow.requests:
                    flow.rises = int((now_s - flow.since_s) // RISE_S)
                    self._push(flow, priority)
                elif flow.finish <= group.virtual_time or now_s - flow.since_s > FORGET_S:
                    del group.flows[client]

    def append(self, request: Request, now_s: float) -> None:
        """Add a new request; one that another engine has begun comes after the preempted ones, before all others."""
        self._size += 1
        if request.is_continuation:
            self._preempted[request] = None
            return
        group = self._classes.setdefault(request.priority, _Class())
        flow = group.flows.setdefault(request.client, _Flow())
        self._number += 1
        self._counts[request.client] += 1
        group.waiting += 1
        flow.requests[request] = self._number
        if len(flow.requests) == 1:
            self._start_flow(flow, group, request.priority, now_s)

    def appendleft(self, request: Request) -> None:
        """Add a preempted request, before all others."""
        self._preempted[request] = None
        self._preempted.move_to_end(request, last=False)
        self._size += 1

    def popleft(self) -> Request:
        """Remove :attr:`first` and charge its client."""
        if self._preempted:
            self._size -= 1
            return self._preempted.popitem(last=False)[0]
        flow = self._first_flow()
        assert flow is not None, "the queue is empty"
        request = next(iter(flow.requests))
        group = self._classes[request.priority]
        flow.finish, group.virtual_time = flow.start + cost_tokens(request), flow.start
        if flow.rises:  # others with an earlier start may still wait
            group.virtual_time = min(each.start for each in group.flows.values() if each.requests)
        self._remove_from_flow(request, flow)
        return request

    def remove(self, request: Request) -> None:
        """Remove a request that was cancelled."""
        if request in self._preempted:
            del self._preempted[request]
            self._size -= 1
            self.refund(request)
        else:
            self._remove_from_flow(request, self._classes[request.priority].flows[request.client])

    def refund(self, request: Request) -> None:
        """Refund the client of an admitted request that has ended for the tokens that were not generated."""
        if request.is_continuation:  # another engine has charged its client
            return
        group = self._classes.get(request.priority)
        flow = group and group.flows.get(request.client)
        if not group or not flow:
            return
        flow.finish -= request.limit_tokens - request.generated
        start = max(group.virtual_time, flow.finish)
        if flow.requests and start < flow.start:
            flow.start = start
            self._push(flow, request.priority)

    def count_before(self, client: str, priority: int, count: int = 1) -> int:
        """How many requests would be admitted before the last of ``count`` new ones, if all cost the same."""
        before = len(self._preempted) + count - 1
        for other_priority, group in self._classes.items():
            if other_priority < priority:
                before += group.waiting
            elif other_priority == priority:
                flow = group.flows.get(client)
                own = len(flow.requests) if flow else 0
                others = (len(each.requests) for each in group.flows.values() if each is not flow)
                before += own + sum(min(number, own + count) for number in others)
        return before

    def has_room(self, client: str, count: int, most: int) -> bool:
        """Whether ``count`` new requests of ``client`` may wait where ``most`` may: in free slots, or in its share."""
        clients = len(self._counts) + (client not in self._counts)
        return len(self) + count <= most or self._counts[client] + count <= most // clients

    def displaced_by(self, client: str) -> Request | None:
        """The request displaced by one of ``client`` in a full queue: the newest of the client with the most requests.

        None if no client has at least two more than ``client``.
        """
        hog, number = max(self._counts.items(), key=lambda each: each[1], default=("", 0))
        if number < self._counts[client] + 2:
            return None
        worst = max(p for p, group in self._classes.items() if hog in group.flows and group.flows[hog].requests)
        return next(reversed(self._classes[worst].flows[hog].requests))

    def _first_flow(self) -> _Flow | None:
        while self._heap and self._heap[0][-1].entry is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def _remove_from_flow(self, request: Request, flow: _Flow) -> None:
        """Remove ``request`` from ``flow``."""
        was_first = next(iter(flow.requests)) is request
        del flow.requests[request]
        self._size -= 1
        self._counts[request.client] -= 1
        if not self._counts[request.client]:
            del self._counts[request.client]
        group = self._classes[request.priority]
        group.waiting -= 1
        if was_first:
            self._start_flow(flow, group, request.priority, self._now_s)
        if not group.waiting:  # no request of the class waits
            del self._classes[request.priority]

    def _start_flow(self, flow: _Flow, group: _Class, priority: int, now_s: float) -> None:
        """Order ``flow`` by its new first request, if it has one."""
        flow.start, flow.since_s, flow.rises, flow.entry = max(group.virtual_time, flow.finish), now_s, 0, None
        if flow.requests:
            self._push(flow, priority)

    def _push(self, flow: _Flow, priority: int) -> None:
        number = next(iter(flow.requests.values()))
        flow.entry = (priority - flow.rises, -flow.rises, flow.start, number, flow)
        heapq.heappush(self._heap, flow.entry)
