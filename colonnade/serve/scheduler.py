"""Chooses what the next forward pass runs: continuous batching with chunked prefill under a token budget.

Requests join and leave at every step (Yu 2022, Orca, §3.1), and long prompts are split into chunks that run together
with the decodes, so that a new prompt never stalls the others (Agrawal 2024, Sarathi-Serve, §4). Each step is filled in
this order:

    1. decodes          one token each; they always fit, because requests are admitted only into unused budget;
                        with speculative decoding followed by drafted tokens, as far as budget, rows and pages are free
    2. running prefills as many tokens as the budget allows, in order of admission
    3. new prompts      admitted in the order of the fair queue, while pages for all the tokens of its first are free

The queue (:mod:`colonnade.serve.fair_queue`) orders requests by priority, and clients in turn. When a decode finds no
free page, the request that was admitted last is preempted: it gives up its pages, returns to the head of the queue and
is recomputed later, prompt and output in one prefill (Kwon 2023, §4.5), which leaves greedy output unchanged. Pages are
:mod:`colonnade.serve.kv_cache_manager`'s.

No request starves. ``running`` and then the preempted requests are always in order of first admission, so the one that
was admitted first always advances, and since any single request fits into the pool, every admitted request ends. In the
queue a request that others overtake rises a class every 30 s, so it becomes the first, and the first is admitted as
soon as enough of the running requests have ended.

Pure Python: no tensors, no clock (the caller passes the time), no model.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from colonnade.errors import RequestError
from colonnade.serve.batch_rows import BatchRows
from colonnade.serve.beam_search import BeamSearch, Continuation
from colonnade.serve.fair_queue import FairQueue
from colonnade.serve.kv_cache_manager import KVCacheManager
from colonnade.serve.page_pool import PagePool
from colonnade.serve.request import Request, Status
from colonnade.serve.speculation import Speculator
from colonnade.serve.work import Slice, Work, sample_args


class Scheduler:
    """Holds every live request and returns the next :class:`Work`; not thread-safe."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_requests: int,
        token_budget: int,
        max_waiting: int,
        prefix_cache: bool = True,
        speculator: Speculator | None = None,
    ):
        self.pool, self.speculator = pool, speculator
        self.kv_cache = KVCacheManager(pool, prefix_cache=prefix_cache)
        self.max_requests, self.token_budget, self.max_waiting = max_requests, token_budget, max_waiting
        self.running: list[Request] = []
        self.batch_rows = BatchRows(max_requests)
        self.waiting = FairQueue()
        self.preemptions = 0
        self.drafts = self.draft_tokens = self.accepted_draft_tokens = 0
        """Drafts tried, their tokens, and those of them that were generated."""

    @property
    def busy(self) -> bool:
        """True while there are requests."""
        return bool(self.running or self.waiting)

    @property
    def full(self) -> bool:
        """True if one more request would be refused."""
        return len(self.waiting) >= self.max_waiting

    def add(self, request: Request, now_s: float = 0.0) -> Request | None:
        """Queue ``request`` at the time ``now_s``; returns the one that it displaces from a full queue.

        The caller has to :meth:`finish` that one. Raises RequestError (429) if the queue is full, CapacityError if the
        request can never fit.
        """
        self.pool.check_fits(len(request.prompt), request.limit_tokens, len(request.source), request.width)
        if request.width > (most := min(self.max_requests, self.token_budget)):
            raise RequestError(
                f"beams is {request.width}, but this server runs {most} at a time; lower it",
                param="beams",
                operator_hint="raise --serve.max_requests and --serve.token_budget",
            )
        if request.search is not None:
            request.search.start(request)
        displaced = None
        if self.full and request.resume is None:
            displaced = self.waiting.displaced_by(request.client)
        if self.full and request.resume is None and displaced is None:
            raise RequestError(
                f"the queue is full: {len(self.waiting):,} requests are already waiting; try again later",
                status=429,
                code="queue_full",
                operator_hint="raise --serve.max_waiting for a longer queue",
            )
        self.waiting.append(request, now_s)
        if self.speculator is not None and not request.needs_history and request.search is None:
            request.drafter = self.speculator.start(request)
        return displaced

    def schedule(self, now_s: float = 0.0) -> Work:
        """Choose the tokens of the next forward pass, at the time ``now_s``; at most one may be uncommitted.

        Empty if there are no requests, or if all wait for the commit.
        """
        budget, chosen, preemptions = self.token_budget, [], self.preemptions
        self.waiting.advance(now_s)

        decoding = [r for r in self.running if r.decodes]
        for request in decoding:
            if request.status is Status.RUNNING:
                self._grow(request)
        for request in decoding:  # all pages are there now: a search is preempted with all its beams
            if request.status is Status.RUNNING:
                chosen.append(self._slice(request, 1))
                budget -= 1
        others = len(chosen) < len(self.running)
        chosen, budget = self._with_drafts(chosen, budget)
        if others:
            for request in self.running:
                if request.pending > 1 and budget:
                    chosen.append(self._slice(request, min(request.pending, budget)))
                    budget -= len(chosen[-1][1].tokens)
            budget -= sum(r.needs_commit and not r.complete for r in self.running)  # for their next decodes
        budget -= sum(r.held for r in self.running) + self._reserved - len(self.running)
        # A step that preempts admits nothing. Sources are encoded whole, the first one also over the budget.
        while budget > 0 and self.preemptions == preemptions and (request := self._admit(budget)):
            if request.encode_source:
                budget = max(1, budget - len(request.source))
            chosen.append(self._slice(request, min(request.pending, budget)))
            budget -= len(chosen[-1][1].tokens) + request.width - 1

        sampling = [request for request, piece in chosen if piece.sample_args is not None]
        for index, request in enumerate(sampling):
            if index and sampling[index - 1] is request:  # a draft, which may or may not give a token
                continue
            request.sample_index, request.in_flight = index, request.in_flight + 1
            if request.complete:
                self.batch_rows.remove(request)  # no further step runs it, though its last token is still in flight
        return Work(tuple(piece for _, piece in chosen), tuple(request for request, _ in chosen))

    def commit(self, work: Work, tokens: Sequence[int]) -> Iterator[tuple[Request, int, int]]:
        """Append the sampled ``tokens`` of ``work``; yields (request, token, index of the sample) after each.

        The caller may :meth:`finish` a request before it asks for the next one. Of drafts, the samples are appended
        that follow from accepted ones; no token is appended to a finished request.
        """
        sampled = [(r, p) for r, p in zip(work.requests, work.slices, strict=True) if p.sample_args is not None]
        rows = [
            (request, piece, token, i) for i, ((request, piece), token) in enumerate(zip(sampled, tokens, strict=True))
        ]
        for _, group in groupby(rows, key=lambda row: id(row[0])):
            drafts = list(group)
            request = drafts[0][0]
            request.in_flight -= 1
            accepted, refused, drafted = 0, False, request.draft_computed
            for i, (_, piece, token, index) in enumerate(drafts):
                if request.status is Status.FINISHED:
                    break
                if request.search is not None and request.status is Status.WAITING:
                    break  # the search starts again
                if i and piece.tokens[0] != request.ids[-1]:
                    refused = True
                    break
                accepted = i
                request.ids.append(token)
                if len(drafts) > 1 and request.status is Status.RUNNING:  # keys of refused drafts are overwritten
                    request.computed = len(request.ids) - 1
                    request.draft_computed = min(drafted, len(request.ids) - 1)
                yield request, token, index
            self.accepted_draft_tokens += accepted
            if self.speculator is not None and len(drafts) > 1:
                self.speculator.observe(request, accepted, refused)

    def _with_drafts(self, chosen: list[tuple[Request, Slice]], budget: int) -> tuple[list[tuple[Request, Slice]], int]:
        """``chosen`` decodes, each followed by a decode for each token drafted for its request, and the rest. Drafts
        take only pages, tokens and rows that are free: they never delay another request.
        """
        if self.speculator is None or not chosen:
            return chosen, budget
        requests = [request for request, _ in chosen if request.drafter is not None]
        # While a token is in flight, the newest one is not known yet.
        limits = [0 if r.in_flight else max(0, r.limit_tokens - r.generated - 1) for r in requests]
        total = max(0, min(budget, self.max_requests - len(chosen)))
        counts = self.speculator.plan(requests, limits, total, len(chosen))
        for i, request in enumerate(requests):
            counts[i] = max(0, min(counts[i], self.kv_cache.max_growth(request)))
            if counts[i]:
                self.kv_cache.grow(request, len(request.ids) + counts[i])
        drafted = [(request, count) for request, count in zip(requests, counts, strict=True) if count]
        drafts = dict[int, list[int]]()
        if drafted:
            tokens = self.speculator.draft(*zip(*drafted, strict=True))
            drafts = {id(request): each for (request, _), each in zip(drafted, tokens, strict=True)}
        result = []
        for request, piece in chosen:
            result.append((request, piece))
            if tokens := drafts.get(id(request)):
                result += [(request, self._draft_slice(request, i, token)) for i, token in enumerate(tokens, 1)]
                request.computed += len(tokens)
                budget -= len(tokens)
                self.drafts, self.draft_tokens = self.drafts + 1, self.draft_tokens + len(tokens)
        return result, budget

    def _draft_slice(self, request: Request, i: int, token: int) -> Slice:
        """A decode of the ``i``-th draft, as if the drafts before it had been generated."""
        start, index = len(request.ids) - 1 + i, request.generated + i
        return Slice(
            start, (token,), tuple(request.pages[: self.pool.pages_for(start + 1)]), sample_args(request, index),
            adapter=request.adapter, source_pages=tuple(request.source_pages), source_length=len(request.source),
        )  # fmt: skip

    def finish(self, request: Request) -> None:
        """Remove ``request``, complete or cancelled, and release its pages.

        A pass in flight may still write into them: that is safe, because whatever is scheduled later runs later.
        """
        if request.status is not Status.FINISHED:
            if request.search is not None:
                self._drop_beams(request)
            if request.status is Status.RUNNING:
                self.running.remove(request)
                self.waiting.refund(request)
            else:
                self.waiting.remove(request)
            self._release(request, Status.FINISHED)

    def _fork(self, search: BeamSearch, root: Request, parent: Request, token: int) -> Request | None:
        """A new beam with the tokens of ``parent``, the last replaced by ``token``; None if the search was preempted.

        It shares the full pages and the source of ``parent``; the tokens in the last page are run again.
        """
        child = Request(
            id=parent.id, prompt=parent.prompt, params=parent.params, seed=parent.seed,
            limit_tokens=parent.limit_tokens, client=parent.client, priority=parent.priority, adapter=parent.adapter,
            source=parent.source, search=search, admitted_s=parent.admitted_s,
        )  # fmt: skip
        while self.pool.free < self.kv_cache.pages_to_fork(parent):
            self._preempt_last()
            if parent.status is not Status.RUNNING:
                return None
        child.ids, child.status = [*parent.ids[:-1], token], Status.RUNNING
        self.kv_cache.fork(parent, child)
        self.running.insert(self.running.index(root) + 1, child)
        search.beams.append(child)
        self.batch_rows.add(child)
        return child

    def continue_search(self, search: BeamSearch, following: Sequence[Continuation]) -> None:
        """Replace the beams of ``search``: the first continuation of each continues in its pages, others are forked."""
        root = search.root
        assert root is not None
        if not any(each.parent is root for each in following):
            other = following[0].parent
            root.exchange(other)
            following = [each._replace(parent=root) if each.parent is other else each for each in following]
        parents = {id(each.parent) for each in following}
        for beam in [beam for beam in search.beams if id(beam) not in parents]:
            self._drop_beam(beam)
        beams: list[tuple[Request, float]] = []
        for each in following:
            beam = each.parent
            if id(beam) in parents:
                parents.remove(id(beam))
                beam.ids[-1], beam.held = each.token, False
            elif forked := self._fork(search, root, beam, each.token):
                beam = forked
            else:
                return
            beams.append((beam, each.total))
        search.replace(beams)

    def _drop_beam(self, beam: Request) -> None:
        """Remove a beam that is not its search's root."""
        assert beam.search is not None
        beam.search.beams.remove(beam)
        self.running.remove(beam)
        self._release(beam, Status.FINISHED)

    @property
    def _reserved(self) -> int:
        """Running requests, with all beams that their searches may have."""
        missing = (r.width - len(r.search.beams) for r in self.running if r.search is not None and r.search.root is r)
        return len(self.running) + sum(missing)

    def restart_all(self) -> int:
        """Preempt all running requests and empty the prefix cache, for new weights; returns how many there were."""
        count = len(self.running)
        while self.running:
            self._preempt_last()
        self.pool.reset_prefix_cache()
        return count

    def audit(self) -> None:
        """Check all invariants of pages and batch rows; for tests, after any call."""
        self.kv_cache.audit(self.running, list(self.waiting))
        rows = self.batch_rows.rows
        assert all(r is None or r.batch_row == i for i, r in enumerate(rows)), "a batch row is another request's"
        decoding = {id(r) for r in self.running if not r.complete}
        assert {id(r) for r in rows if r} == decoding, "batch rows are not those of the running requests"
        assert self._reserved <= self.max_requests
        searches = [r.search for r in self.running if r.search is not None and r.search.root is r]
        beams = [beam for search in searches for beam in search.beams]
        assert {id(r) for r in beams} == {id(r) for r in self.running if r.search}, "beams are not the running ones"

    def _slice(self, request: Request, count: int) -> tuple[Request, Slice]:
        """Schedule the next ``count`` tokens of ``request``."""
        start, end, known = request.computed, request.computed + count, len(request.ids)
        tokens = tuple(request.ids[start:end])
        if end > known:
            tokens += (-1 - request.sample_index,) * (end - max(start, known))
        args = None
        if end == known + request.in_flight:
            args = sample_args(request, end - len(request.prompt))
            if request.search is not None:
                args = args._replace(temperature=0.0, logprobs=request.search.candidates)
        pages = tuple(request.pages[: self.pool.pages_for(end)])
        request.computed = end
        self.kv_cache.cache_full_pages(request)
        targets, last = (), len(request.prompt) - 1
        if request.unscored and end > request.scored:
            indices = range(start, end)
            targets = tuple(request.prompt[i + 1] if request.scored <= i < last else -1 for i in indices)
            request.scored = min(end, last)
        alternatives = (request.params.prompt_logprobs or 0) if targets else 0
        source = request.source if request.encode_source else ()
        request.encode_source = False
        piece = Slice(
            start, tokens, pages, args, request.batch_row, targets, alternatives, request.adapter, source,
            tuple(request.source_pages), len(request.source),
        )  # fmt: skip
        return request, piece

    def _admit(self, budget: int) -> Request | None:
        """Start the first waiting request, with pages for all its tokens, if they are free."""
        first = self.waiting.first
        if first is None or first.in_flight or first.width > min(budget, self.max_requests - self._reserved):
            return None
        if not self.kv_cache.admit(first):
            return None
        self.waiting.popleft().status = Status.RUNNING
        self.running.append(first)
        self.batch_rows.add(first)
        return first

    def _grow(self, request: Request) -> None:
        """Allocate a page for the next token of ``request`` if it needs one, unless it had to be preempted."""
        if not self.kv_cache.lacks_page(request):
            return
        while not self.pool.free:
            self._preempt_last()
            if request.status is not Status.RUNNING:
                return
        self.kv_cache.grow(request, request.length)

    def _preempt_last(self) -> None:
        """Preempt the running request that was admitted last, with all its beams, and start its search again."""
        last = self.running[-1]
        if (search := last.search) is not None:
            assert search.root is not None
            self._drop_beams(search.root)
            last = search.root
            last.ids, last.page_hashes, last.held = list(last.prompt), [], False
            search.start(last)
        self.running.remove(last)
        self._release(last, Status.WAITING)
        self.waiting.appendleft(last)
        self.preemptions += 1

    def _drop_beams(self, root: Request) -> None:
        """Remove all beams of a search but its root."""
        assert root.search is not None
        for beam in [beam for beam in root.search.beams if beam is not root]:
            self._drop_beam(beam)

    def _release(self, request: Request, status: Status) -> None:
        self.kv_cache.release(request)
        self.batch_rows.remove(request)
        request.status = status
