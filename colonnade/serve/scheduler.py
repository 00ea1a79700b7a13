"""What the next forward pass runs: continuous batching with chunked prefill under a token budget.

Requests join and leave at every step (Yu 2022, Orca, §3.1), and long prompts are cut into chunks that ride along with
the decodes, so that a new arrival never stalls the others (Agrawal 2024, Sarathi-Serve, §4). Each step is filled in
this order, first come, first served within each:

    1. decodes             one token each; there is room, because nobody is admitted but into spare budget
    2. prompts under way   as many tokens as the budget leaves
    3. new prompts         admitted when pages for all their tokens are free, never past an earlier one

When a decode finds no free page the youngest running request gives its pages back and returns to the head of the queue;
it is recomputed later, prompt and output in one prefill (Kwon 2023, §4.5), which leaves greedy output as it was. A
request starts after the pages of its prefix that are still there, whoever computed them. Hence ``running + waiting`` is
always in order of arrival, the oldest request always advances, and since any request alone fits into the pool, every
request ends.

Pure Python: no tensor, no clock, no model.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from colonnade.errors import RequestError
from colonnade.serve.batch_slots import BatchSlots
from colonnade.serve.page_pool import PagePool, extend_names
from colonnade.serve.request import Request, Status
from colonnade.serve.sampling_params import Draw


@dataclass(frozen=True, slots=True)
class Slice:
    """A request's share of one forward pass."""

    start: int
    """Position of the first of ``tokens``, which is also the number of tokens already in the cache."""
    tokens: tuple[int, ...]
    """Negative, -1 - r, for the token that draw r of the work before this one gives."""
    pages: tuple[int, ...]
    """The page table up to and including ``tokens``."""
    draw: Draw | None
    """How the next token is chosen from the last row's logits, when ``tokens`` reach the end of what is known."""
    place: int = -1
    """The row of a step of fixed shape, where places were dealt out (:mod:`~colonnade.serve.batch_slots`)."""

    def slots(self, page_tokens: int) -> list[int]:
        """Where in the cache each token's key and value go: page · page_tokens + place within the page."""
        span = range(self.start, self.start + len(self.tokens))
        return [self.pages[i // page_tokens] * page_tokens + i % page_tokens for i in span]


@dataclass(frozen=True, slots=True)
class Work:
    """One forward pass: what each request runs. Ranks that only follow get it without the requests."""

    slices: tuple[Slice, ...]
    requests: tuple[Request, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens in the pass."""
        return sum(len(piece.tokens) for piece in self.slices)

    @property
    def draws(self) -> list[Draw]:
        """Of the slices that draw a token, in order."""
        return [piece.draw for piece in self.slices if piece.draw is not None]


class Scheduler:
    """Holds every live request and hands out :class:`Work`; one thread calls it."""

    def __init__(
        self, pool: PagePool, *, max_requests: int, token_budget: int, max_waiting: int, prefix_cache: bool = True
    ):
        self.pool, self.prefix_cache = pool, prefix_cache
        self.max_requests, self.token_budget, self.max_waiting = max_requests, token_budget, max_waiting
        self.running: list[Request] = []
        self.places = BatchSlots(max_requests)
        self.waiting: deque[Request] = deque()
        self.preemptions = 0
        self.looked_up = self.found = 0
        """Tokens of admitted requests whose pages were looked for, and those that were there."""

    @property
    def busy(self) -> bool:
        """True while any request is alive."""
        return bool(self.running or self.waiting)

    @property
    def full(self) -> bool:
        """True when one more request would be refused."""
        return len(self.waiting) >= self.max_waiting

    def add(self, request: Request) -> None:
        """Queue ``request``; RequestError (429) when the queue is full, CapacityError when it can never fit."""
        self.pool.check_fits(len(request.prompt) + request.limit_tokens - 1)  # the last token is never run
        if self.full:
            raise RequestError(
                f"{len(self.waiting)} requests wait already, as many as --serve.max_waiting allows; try again later",
                status=429,
                code="queue_full",
            )
        self.waiting.append(request)

    def schedule(self) -> Work:
        """Choose the tokens of the next forward pass; at most one pass may be handed out and not committed.

        Empty when no request is alive, or when all wait for the commit.
        """
        budget, chosen = self.token_budget, []

        for request in [r for r in self.running if r.pending == 1 and not r.complete]:
            if request.status is Status.RUNNING and self._grow(request):
                chosen.append(self._slice(request, 1))
                budget -= 1
        for request in self.running:
            if request.pending > 1 and budget:
                chosen.append(self._slice(request, min(request.pending, budget)))
                budget -= len(chosen[-1][1].tokens)
        # Who was put back just now is not admitted at once: of the pages it gave back and needs, one is taken.
        while budget and (request := self._admit()):
            chosen.append(self._slice(request, min(request.pending, budget)))
            budget -= len(chosen[-1][1].tokens)

        for row, request in enumerate(request for request, piece in chosen if piece.draw is not None):
            request.row, request.ahead = row, request.ahead + 1
            if request.complete:
                self.places.leave(request)  # it runs no more, though its last token is not here yet
        return Work(tuple(piece for _, piece in chosen), tuple(request for request, _ in chosen))

    def commit(self, work: Work, tokens: Sequence[int]) -> list[tuple[Request, int]]:
        """Note that ``work`` has run; ``tokens`` are the drawn ones, in order. Returns each with its request, but for
        requests that have ended meanwhile.
        """
        drawing = [r for r, piece in zip(work.requests, work.slices, strict=True) if piece.draw is not None]
        grown = []
        for request, token in zip(drawing, tokens, strict=True):
            request.ahead -= 1
            if request.status is not Status.FINISHED:
                request.ids.append(token)
                grown.append((request, token))
        return grown

    def finish(self, request: Request) -> None:
        """Let go of ``request``, done or cancelled, and of its pages; a pass under way may still write into them, for
        what is handed out later runs later.
        """
        if request.status is Status.FINISHED:
            return
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self._release(request, Status.FINISHED)

    def audit(self) -> None:
        """Check that no page leaked and that nobody overtook anybody; for tests, after any call."""
        self.pool.audit(request.pages for request in self.running)
        assert not any(request.pages for request in self.waiting), "a waiting request holds pages"
        rows = self.places.rows
        assert all(r is None or r.place == i for i, r in enumerate(rows)), "a place is another's"
        assert {id(r) for r in rows if r} == {id(r) for r in self.running if not r.complete}, "a place is nobody's"
        assert len(self.running) <= self.max_requests

    def _slice(self, request: Request, count: int) -> tuple[Request, Slice]:
        """Hand out the next ``count`` tokens."""
        start, end = request.computed, request.computed + count
        tokens = request.ids[start:end] + [-1 - request.row] * (end - max(start, len(request.ids)))
        piece = Slice(
            start=start,
            tokens=tuple(tokens),
            pages=tuple(request.pages[: self.pool.pages_for(end)]),
            draw=Draw.of(request.params, request.seed, request.generated + request.ahead)
            if end == request.length
            else None,
            place=request.place,
        )
        request.computed = end
        self._name(request)
        return request, piece

    def _admit(self) -> Request | None:
        """Move the head of the queue to the running ones, with pages for all its tokens, if there is room."""
        if not self.waiting or len(self.running) == self.max_requests or self.waiting[0].ahead:
            return None
        known = self._known(self.waiting[0])
        needed = self.pool.pages_for(len(self.waiting[0].ids)) - len(known)
        if needed > self.pool.free - self.pool.unheld(known):
            return None
        request = self.waiting.popleft()
        self.pool.share(known)  # before anything is allocated, which might take them
        request.pages, request.status = [*known, *self.pool.allocate(needed, known)], Status.RUNNING
        request.computed, request.named = len(known) * self.pool.page_tokens, len(known)
        if self.prefix_cache:
            self.looked_up, self.found = self.looked_up + len(request.ids), self.found + request.computed
        self.running.append(request)
        self.places.join(request)
        return request

    def _known(self, request: Request) -> list[int]:
        """Pages that hold the beginning of ``request``'s tokens already; the last token is always run."""
        if not self.prefix_cache:
            return []
        extend_names(request.names, request.ids, self.pool.page_tokens)
        return self.pool.find(request.names[: (len(request.ids) - 1) // self.pool.page_tokens])

    def _name(self, request: Request) -> None:
        """Tell the pool of the full pages of which all tokens are known and handed out.

        Whoever is admitted in the same breath may share them: in each layer a pass writes all its keys and values
        before it reads any.
        """
        if not self.prefix_cache:
            return
        extend_names(request.names, request.ids, self.pool.page_tokens)
        full = min(request.computed, len(request.ids)) // self.pool.page_tokens
        for i in range(request.named, full):
            self.pool.name(request.pages[i], request.names[i])
        request.named = max(request.named, full)

    def _grow(self, request: Request) -> bool:
        """Make room for one more token of ``request``; False when it had to give way itself."""
        if self.pool.pages_for(request.length) == len(request.pages):
            return True
        while not self.pool.free:
            youngest = self.running.pop()
            self._release(youngest, Status.WAITING)
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is request:
                return False
        request.pages += self.pool.allocate(1, request.pages)
        return True

    def _release(self, request: Request, status: Status) -> None:
        if request.pages:
            self._name(request)  # what became known since its last slice
        self.pool.release(request.pages)
        self.places.leave(request)
        request.pages, request.computed, request.named, request.status = [], 0, 0, status
