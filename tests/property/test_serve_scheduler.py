"""Any interleaving of arrivals, steps, cancellations and preemptions: no leaks, and no request starves."""

from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from colonnade.errors import CapacityError, RequestError
from colonnade.serve import speculation
from colonnade.serve.draft_model import DraftModel
from colonnade.serve.draft_planner import PassTimes
from colonnade.serve.page_pool import PagePool
from colonnade.serve.request import Request, Status
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.scheduler import Scheduler
from colonnade.serve.speculation import NgramSpeculator, Speculator
from colonnade.serve.work import Work


def next_token(ids: list[int], tokens: int) -> int:
    """A fake model of so many tokens: the next one is a function of all so far, as for greedy decoding."""
    return hash(tuple(ids)) % tokens


END = 13
"""A token that ends a request before its limit."""


class CheapDrafts(PassTimes):
    """Drafts always pay."""

    def draft_s(self, rows: int) -> float:
        return 1e-6


class Sampled(NamedTuple):
    """Sampled tokens of a pass."""

    tokens: list[int]

    def tolist(self) -> list[int]:
        return self.tokens


class Serving(RuleBasedStateMachine):
    """Drives a scheduler like an engine, with a fake model that records the content of each page slot."""

    @initialize(
        pages=st.integers(1, 12),
        page_tokens=st.integers(1, 5),
        max_requests=st.integers(1, 6),
        token_budget=st.integers(1, 9),
        max_waiting=st.integers(1, 5),
        prefix_cache=st.booleans(),
        async_scheduling=st.booleans(),
        draft_tokens=st.integers(0, 3),
        model_tokens=st.sampled_from([97, 2]),
        draft_model=st.booleans(),
        end=st.sampled_from([END, 1]),
    )
    def start(
        self,
        pages: int,
        page_tokens: int,
        max_requests: int,
        token_budget: int,
        max_waiting: int,
        prefix_cache: bool,
        async_scheduling: bool,
        draft_tokens: int,
        model_tokens: int,
        draft_model: bool,
        end: int,
    ):
        self.begin(
            pages, page_tokens, max_requests, token_budget, max_waiting, prefix_cache, async_scheduling, draft_tokens,
            model_tokens, draft_model, end,
        )  # fmt: skip

    def begin(
        self,
        pages: int,
        page_tokens: int,
        max_requests: int,
        token_budget: int,
        max_waiting: int,
        prefix_cache: bool,
        async_scheduling: bool,
        draft_tokens: int,
        model_tokens: int,
        draft_model: bool,
        end: int,
    ):
        self.patch = patch.object(speculation, "MIN_RATE", 0.0)  # wrong drafts too
        self.patch.start()
        self.model_tokens, self.end = model_tokens, end
        self.pool = PagePool(pages, page_tokens)
        speculator: Speculator | None = NgramSpeculator(draft_tokens) if draft_tokens else None
        if draft_tokens and draft_model:
            speculator = DraftModel(
                self.run_draft, self.pool, CheapDrafts(0.1), most=draft_tokens, context=99, vocab_sizes=(97, 97),
                max_requests=max_requests, token_budget=token_budget,
            )  # fmt: skip
        self.scheduler = Scheduler(
            self.pool,
            max_requests=max_requests,
            token_budget=token_budget,
            max_waiting=max_waiting,
            prefix_cache=prefix_cache,
            speculator=speculator,
        )
        self.slots: dict[tuple[int, int], int] = {}  # (page, offset) -> the token whose key and value it holds
        self.draft_slots: dict[tuple[int, int], int] = {}
        self.draft_last: list[int] = []
        self.live: list[Request] = []
        self.arrived = 0
        self.admitted: list[Request] = []
        self.now_s = 1000.0
        self.texts: list[list[int]] = []
        self.async_scheduling, self.flying, self.last = async_scheduling, None, []

    @precondition(lambda self: self.texts)
    @rule(
        which=st.integers(0, 100), length=st.integers(1, 20), more=st.lists(st.integers(0, 96), max_size=3),
        limit=st.integers(1, 12),
    )  # fmt: skip
    def arrive_with_a_known_beginning(self, which: int, length: int, more: list[int], limit: int):
        self.arrive(self.texts[which % len(self.texts)][:length] + more, limit, "a", 0)

    @rule(
        prompt=st.lists(st.integers(0, 96), min_size=1, max_size=20), limit=st.integers(1, 12),
        client=st.sampled_from("ab"), priority=st.integers(-1, 1),
    )  # fmt: skip
    def arrive(self, prompt: list[int], limit: int, client: str, priority: int):
        request = Request(
            id=str(self.arrived), prompt=tuple(prompt), params=SamplingParams(), seed=0, limit_tokens=limit,
            client=client, priority=priority,
        )  # fmt: skip
        full = len(self.scheduler.waiting) >= self.scheduler.max_waiting
        if self.pool.pages_for(len(prompt) + limit - 1) > self.pool.pages:
            with pytest.raises(CapacityError, match=r"this server holds \d+ .*; set --serve.pages to \d+ or more"):
                self.scheduler.add(request, self.now_s)
        elif full and self.scheduler.waiting.displaced_by(client) is None:
            with pytest.raises(RequestError) as refusal:
                self.scheduler.add(request, self.now_s)
            assert refusal.value.status == 429
        else:
            displaced = self.scheduler.add(request, self.now_s)
            assert (displaced is not None) == full
            if displaced is not None:  # the engine ends it
                assert displaced.client != client and not displaced.pages
                self.live.remove(displaced)
                self.scheduler.finish(displaced)
            self.texts.append(request.ids)
            self.live.append(request)
            self.arrived += 1

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int):
        request = self.live.pop(which % len(self.live))
        self.scheduler.finish(request)
        self.scheduler.finish(request)  # finishing twice is harmless
        assert request.status is Status.FINISHED and not request.pages

    @rule()
    def reset_cache(self):
        self.pool.reset_prefix_cache()
        assert not self.texts or not self.pool.find_cached(self.live[0].page_hashes if self.live else [])

    @precondition(lambda self: self.live)
    @rule(steps=st.integers(1, 4), step_s=st.sampled_from([0.0, 0.5, 20.0]))
    def step(self, steps: int, step_s: float):
        for _ in range(steps):
            self.now_s += step_s
            self.one_step()

    def one_step(self):
        if not self.live:
            return
        before = self.scheduler.preemptions, list(self.scheduler.running)
        queued = list(self.scheduler.waiting)
        work = self.scheduler.schedule(self.now_s)
        if self.scheduler.preemptions > before[0]:  # pages are short: no new request may get any in the same step
            assert set(work.requests) <= set(before[1])
        assert work.tokens <= self.scheduler.token_budget
        assert len(self.scheduler.running) <= self.scheduler.max_requests
        assert sum(not r.complete for r in self.scheduler.running) <= self.scheduler.token_budget
        self.check_order(queued)
        ready = (work, self.run_work(work)) if work.slices else None
        if self.async_scheduling:
            ready, self.flying = self.flying, ready
        assert ready or self.flying, "no step is finished and none is in flight"
        for request, token, _ in self.scheduler.commit(*ready) if ready else ():
            assert request.ids[-1] == token
            if request.generated == request.limit_tokens or token == self.end:
                self.scheduler.finish(request)
                self.live.remove(request)
                self.check_output(request)
        if not self.live:
            self.flying = None

    def run_work(self, work) -> list[int]:
        """The tokens that the fake model samples."""
        tokens, size = [], self.pool.page_tokens
        for request, piece in zip(work.requests, work.slices, strict=True):
            for offset, token in enumerate(piece.tokens):
                at = piece.start + offset
                holders = [
                    r for r in self.live if piece.pages[at // size] in r.pages and r.computed > at // size * size
                ]
                assert set(holders) <= {request, *(r for r in holders if r.ids[: at + 1] == request.ids[: at + 1])}
                self.slots[piece.pages[at // size], at % size] = token if token >= 0 else self.last[-1 - token]
        drafts: list[int] = []
        before = None
        for request, piece in zip(work.requests, work.slices, strict=True):
            # What attention would read through the page table must be exactly the request's own tokens.
            end = piece.start + len(piece.tokens)
            seen = [self.slots[piece.pages[i // size], i % size] for i in range(end)]
            drafts = [*drafts, *piece.tokens] if request is before else []
            before = request
            assert seen == self.text_of(request, end - len(drafts)) + drafts
            assert end < len(request.prompt) + request.limit_tokens
            if piece.sample_args is not None:
                assert piece.sample_args.index == end - len(request.prompt)
                tokens.append(next_token(seen, self.model_tokens))
            else:
                assert end < len(request.ids)
        self.last = tokens
        return tokens

    def run_draft(self, work: Work) -> "Sampled":
        """The tokens that the draft model samples: in a quarter of the places another one than the target."""
        size, tokens = self.pool.page_tokens, []
        for piece in work.slices:
            assert piece.start + len(piece.tokens) <= len(piece.pages) * size
            for at, token in enumerate(piece.tokens, piece.start):
                assert -len(self.draft_last) <= token
                page = piece.pages[at // size]
                self.draft_slots[page, at % size] = token if token >= 0 else self.draft_last[-1 - token]
        for piece in work.slices:
            end = piece.start + len(piece.tokens)
            seen = [self.draft_slots[piece.pages[i // size], i % size] for i in range(end)]
            confirmed = [r for r in self.live if r.pages[: len(piece.pages)] == list(piece.pages)]
            assert any(seen[: len(r.ids)] == r.ids[:end] for r in confirmed), "the draft model reads another text"
            if piece.sample_args is not None:
                tokens.append(next_token(seen, self.model_tokens) ^ (sum(seen) % 4 == 0))
        self.draft_last = tokens or self.draft_last
        return Sampled(tokens)

    def text_of(self, request: Request, length: int) -> list[int]:
        """The first tokens of a request, including those still in flight."""
        ids = list(request.prompt)
        while len(ids) < length:
            ids.append(next_token(ids, self.model_tokens))
        return ids[:length]

    def check_order(self, queued: list[Request]):
        """Running and preempted requests are in order of admission, and so are a client's requests of one class."""
        for request in (request for request in self.scheduler.running if request not in self.admitted):
            before = [r for r in queued if (r.client, r.priority) == (request.client, request.priority)]
            rest = [r for r in before if r not in self.admitted]
            assert rest[0] is request, "an earlier request of the same client still waits"
            assert not any(r in self.admitted for r in self.scheduler.waiting), "a preempted request was overtaken"
            self.admitted.append(request)
        preempted = [r for r in self.scheduler.waiting if r in self.admitted]
        assert [*self.scheduler.running, *preempted] == [r for r in self.admitted if r in self.live]

    def check_output(self, request: Request):
        assert request.ids == self.text_of(request, len(request.ids))
        assert self.end not in request.ids[len(request.prompt) : -1]
        assert request.generated == request.limit_tokens or request.ids[-1] == self.end

    @invariant()
    def nothing_leaks(self):
        if hasattr(self, "scheduler"):
            self.scheduler.audit()
            alive = [*self.scheduler.running, *self.scheduler.waiting]
            assert len(alive) == len(self.live) and set(alive) == set(self.live)
            assert self.pool.used + self.pool.free == self.pool.pages

    def teardown(self):
        if hasattr(self, "scheduler"):
            for _ in range(10_000):
                self.one_step()
            self.patch.stop()
            assert not self.live, "a request never finished"
            assert not self.scheduler.busy and self.pool.free == self.pool.pages


class Drafting(Serving):
    """The same with room for drafts, of which many are right: the fake model has two tokens."""

    @initialize(
        pages=st.integers(4, 24), page_tokens=st.integers(1, 4), max_requests=st.integers(4, 9),
        prefix_cache=st.booleans(), async_scheduling=st.booleans(), draft_tokens=st.integers(1, 4),
        draft_model=st.booleans(), end=st.sampled_from([END, 1]),
    )  # fmt: skip
    def start(
        self, pages: int, page_tokens: int, max_requests: int, prefix_cache: bool, async_scheduling: bool,
        draft_tokens: int, draft_model: bool, end: int,
    ):  # fmt: skip
        self.begin(
            pages, page_tokens, max_requests, 2 * max_requests, 5, prefix_cache, async_scheduling, draft_tokens, 2,
            draft_model, end,
        )  # fmt: skip


TestDrafting = pytest.mark.slow(Drafting.TestCase)
TestDrafting.settings = settings(max_examples=200, stateful_step_count=30)
TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=150, stateful_step_count=30)


def test_a_step_that_preempts_admits_nothing() -> None:
    """Regression: a preempted request that had pages of refused drafts was admitted again in the same step."""
    state = Drafting()
    known, cancel = state.arrive_with_a_known_beginning, partial(state.cancel, which=0)
    state.start(
        pages=14, page_tokens=1, max_requests=4, prefix_cache=True, async_scheduling=False, draft_tokens=1,
        draft_model=False, end=13,
    )  # fmt: skip
    state.arrive(client="a", limit=1, priority=0, prompt=[0, 0])
    cancel()
    known(length=1, limit=1, more=[], which=0)
    cancel()
    known(length=1, limit=1, more=[], which=0)
    known(length=1, limit=2, more=[], which=4)
    state.arrive(client="a", limit=1, priority=0, prompt=[0] * 14 + [1])
    cancel()
    state.arrive(client="a", limit=1, priority=0, prompt=[0])
    state.arrive(client="a", limit=7, priority=-1, prompt=[0])
    known(length=1, limit=3, more=[0, 94], which=0)
    state.step(step_s=0.0, steps=1)
    state.reset_cache()
    cancel()
    known(length=4, limit=2, more=[0, 0], which=76)
    known(length=1, limit=1, more=[], which=0)
    state.step(step_s=0.0, steps=6)
    state.teardown()
