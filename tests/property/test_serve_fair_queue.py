"""The fair queue: equal shares of tokens, first come first served for one client, and no request starves."""

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from colonnade.serve.fair_queue import RISE_S, FairQueue, cost_tokens
from colonnade.serve.request import Request
from colonnade.serve.sampling_params import SamplingParams

PARAMS = SamplingParams()


def make(client: str, prompt: int = 1, limit: int = 1, priority: int = 0) -> Request:
    return Request(
        id="", prompt=(1,) * prompt, params=PARAMS, seed=0, limit_tokens=limit, client=client, priority=priority
    )


SIZES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=40)


@given(st.dictionaries(st.sampled_from("abcd"), SIZES, min_size=2), st.data())
def test_shares_differ_by_one_request_of_each(sizes: dict[str, list[tuple[int, int]]], data: st.DataObject):
    """Between any two moments at which both clients wait, whatever each has sent, and however it arrived."""
    queue, coming = FairQueue(), {client: [make(client, *each) for each in all_] for client, all_ in sizes.items()}
    largest = {client: max(map(cost_tokens, requests)) for client, requests in coming.items()}
    admitted: dict[str, int] = defaultdict(int)
    since: dict[tuple[str, str], tuple[int, int]] = {}  # tokens of a pair of clients when both began to wait
    left = sum(map(len, coming.values()))
    while left:
        sends = [client for client, requests in coming.items() if requests]
        if sends and (not queue or data.draw(st.booleans())):
            client = data.draw(st.sampled_from(sends))
            for _ in range(data.draw(st.integers(1, 10))):
                if coming[client]:
                    queue.append(coming[client].pop(0), 0.0)
        else:
            request = queue.popleft()
            admitted[request.client] += cost_tokens(request)
            left -= 1
        waiting = {request.client for request in queue}
        for a, b in ((a, b) for a in sizes for b in sizes if a < b):
            if not {a, b} <= waiting:
                since.pop((a, b), None)
                continue
            at = since.setdefault((a, b), (admitted[a], admitted[b]))
            assert abs((admitted[a] - at[0]) - (admitted[b] - at[1])) <= largest[a] + largest[b]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["append", "pop", "remove", "preempt", "wait"]), st.integers(0, 1 << 16)), max_size=120
)


@given(OPERATIONS)
def test_equals_a_plain_list_of_lines(operations: list[tuple[str, int]]):
    """Order within a client, length, membership; preempted requests first, the last one preempted at their head."""
    queue, lines, preempted, running, now_s = FairQueue(), defaultdict(list), [], [], 0.0
    for what, which in operations:
        everything = [*preempted, *(request for line in lines.values() for request in line)]
        if what == "append":
            request = make("abc"[which % 3], priority=which % 2)
            queue.append(request, now_s)
            lines[request.client, request.priority].append(request)
        elif what == "pop" and everything:
            first, request = queue.first, queue.popleft()
            assert request is first
            expected = preempted or lines[request.client, request.priority]
            assert expected.pop(0) is request
            running.append(request)
        elif what == "remove" and everything:
            request = everything[which % len(everything)]
            queue.remove(request)
            (preempted if request in preempted else lines[request.client, request.priority]).remove(request)
        elif what == "preempt" and running:
            preempted.insert(0, running.pop())
            queue.appendleft(preempted[0])
        elif what == "wait":
            now_s += which % 40
            queue.advance(now_s)
        left = {*preempted, *(request for line in lines.values() for request in line)}
        assert len(queue) == len(left) and set(queue) == left and list(queue)[: len(preempted)] == preempted
        assert (queue.first is None) == (not left)


@given(st.integers(0, 4), st.integers(1, 8), st.integers(1, 5))
def test_no_request_starves(priority: int, clients: int, step_s: int):
    """New clients and better classes arrive faster than requests are admitted, for ever."""
    queue, victim, now_s = FairQueue(), make("victim", 50, 50, priority), 0.0
    queue.append(victim, now_s)
    steps = 0
    while queue.popleft() is not victim:
        for i in range(clients):
            queue.append(make(f"{steps}-{i}"), now_s)
        now_s, steps = now_s + step_s, steps + 1
        queue.advance(now_s)
        assert now_s <= RISE_S * (priority + 1) + step_s


def test_a_backlog_delays_others_by_one_request():
    queue = FairQueue()
    for _ in range(1000):
        queue.append(make("flood", 10, 10), 0.0)
    admitted = [queue.popleft() for _ in range(500)]
    queue.advance(1000.0)  # a long backlog earns no rise
    admitted.append(queue.popleft())
    queue.append(make("other", 500, 500), 1000.0)
    order = [queue.popleft().client for _ in range(4)]
    assert order.index("other") <= 1 and len(admitted) == 501


def test_tokens_that_were_not_generated_are_refunded():
    queue = FairQueue()
    for _ in range(3):
        queue.append(make("modest", 1, 1000), 0.0)
        queue.append(make("other", 1, 10), 0.0)
    first = queue.popleft()
    assert first.client == "modest"
    assert queue.popleft().client == "other" and queue.first.client == "other"
    queue.refund(first)  # it ended without a token
    assert queue.popleft().client == "modest"


def test_better_classes_first_and_a_rise_after_thirty_seconds():
    queue = FairQueue()
    late, batch = make("late", priority=1), make("batch", priority=2)
    queue.append(batch, 0.0)
    queue.append(late, 1.0)
    assert queue.first is late
    queue.advance(29.0)
    assert queue.first is late
    queue.advance(30.5)
    assert queue.popleft() is batch, "it has risen into the other's class, and is ahead of those in it"


def test_count_before_takes_turns():
    queue = FairQueue()
    for client in ["flood"] * 100 + ["a"] * 2 + ["b"]:
        queue.append(make(client), 0.0)
    queue.append(make("urgent", priority=-1), 0.0)
    assert queue.count_before("new", 0) == 1 + 3  # the urgent one, and one of each other client
    assert queue.count_before("a", 0) == 1 + 2 + 3 + 1
    assert queue.count_before("new", -1) == 1 and queue.count_before("new", -2) == 0
    assert queue.count_before("new", 1) == len(queue) == 104


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 1)), max_size=80), st.integers(1, 12))
def test_a_full_queue_is_shared_equally(adds: list[tuple[str, int]], most: int):
    """A client below its share is never refused, and the newest request of the client that has most makes way."""
    queue, waiting = FairQueue(), list[Request]()
    for client, priority in adds:
        counts = Counter(request.client for request in waiting)
        share = most // len({*counts, client})
        request = make(client, priority=priority)
        if len(waiting) == most:
            displaced = queue.displaced_by(client)
            assert queue.has_room(client, 1, most) <= (displaced is not None)
            if displaced is None:
                assert counts[client] >= share
                continue
            hog = displaced.client
            assert counts[hog] == max(counts.values()) >= counts[client] + 2
            worst = max(each.priority for each in waiting if each.client == hog)
            assert displaced is [each for each in waiting if (each.client, each.priority) == (hog, worst)][-1]
            queue.remove(displaced)
            waiting.remove(displaced)
        queue.append(request, 0.0)
        waiting.append(request)
        assert len(queue) == len(waiting) <= most
