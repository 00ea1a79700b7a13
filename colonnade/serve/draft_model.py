"""Speculative decoding with a draft model: a smaller model with the same vocabulary generates the drafts.

    before a decode step   the draft model decodes up to k tokens of each request, one pass for each
    the step               the target decodes the newest token and the k drafts, each as its own row, and samples
    commit                 samples are kept while they equal the drafts (:mod:`colonnade.serve.speculation`)

Leviathan 2023 and Chen 2023 accept a draft with the ratio of the two models' probabilities, which keeps the target's
distribution. Here both models sample with the same noise, a function of seed, position and token: a draft is accepted
if it is the token that the target draws with this noise anyway, so the text of a seed does not change. With the same
noise the two draws are equal nearly as often as the distributions overlap.

The draft model has its own KV cache with the target's pages and page tables: slot i of a page holds the same token
in both. So sharing, preemption and cancellation need no additional code. :attr:`Request.draft_computed` tokens of a
request are in it, and the pages in :attr:`PagePool.drafted` are complete. Prompts, and tokens generated without drafts,
are run in chunks once a request is drafted for; refused drafts are overwritten.

:mod:`colonnade.serve.draft_planner` chooses the number of drafted tokens. Where it is 0, the tokens that the draft
model has not seen are occasionally run in one pass that samples after the last ones: comparing these samples with the
text gives acceptance rates without drafting. This takes at most 1/64 of the time.

Only rank 0 drafts, with the whole draft model, also where the target is on several ranks. Pure Python: ``run`` has the
tensors.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from colonnade.serve.draft_planner import PassTimes, choose_counts
from colonnade.serve.page_pool import PagePool
from colonnade.serve.request import Request
from colonnade.serve.work import Slice, Work, sample_args

RATE_STEP = 1 / 16
"""Weight of a request's newest draft in its acceptance rate."""

SHARED_RATE_STEP = 1 / 64
"""The same for the rate of all requests, with which a new one starts."""

FIRST_RATE = 0.7
"""Initial acceptance rate."""

ROWS = 2
"""Tokens of a request that its first draft pass decodes as rows: the newest, and the last draft if all were right."""

PROBE_TOKENS = 16
"""Tokens that a probe samples."""

PROBE_SHARE = 1 / 64
"""Time of probes to that of the target's passes, at most."""

SAVED_PASSES = 64
"""Maximum time of consecutive probes, in passes of the target."""

CATCH_UP_TOKENS = 32
"""Maximum number of tokens for the draft model to catch up on, per token that may still be generated."""


class Tokens(Protocol):
    """The sampled tokens of a pass that may still run."""

    def tolist(self) -> list[int]:
        """Wait for them."""
        ...


@dataclass(slots=True)
class DraftState:
    """A request's drafts."""

    rate: float
    """Share of its recent drafts that were right."""
    active: bool = False
    """Whether the last plan had drafts for it."""
    marked: int = 0
    """Its pages that are in :attr:`PagePool.drafted`."""
    checked: int = 0
    """Its tokens that are known to be in the draft model's vocabulary."""


class DraftModel:
    """A :class:`~colonnade.serve.speculation.Speculator`; ``run`` runs a :class:`Work` with the draft model."""

    def __init__(
        self,
        run: Callable[[Work], Tokens],
        pool: PagePool,
        times: PassTimes,
        *,
        most: int,
        context: int,
        vocab_sizes: tuple[int, int],
        max_requests: int,
        token_budget: int,
    ):
        """``most`` drafts for a step; ``context`` of the draft model; ``vocab_sizes`` of draft model and target."""
        self.run, self.pool, self.times, self.most, self.context = run, pool, times, most, context
        self.vocab_size, self.target_vocab_size = vocab_sizes
        self.max_requests, self.token_budget = max_requests, token_budget
        self.rate, self._observed = FIRST_RATE, 2
        """Share of the recent drafts of all requests that were right; how many, and two to begin with."""
        self._read_s = 0.0
        """When the tokens of the target's last pass were read."""
        self._probe_s = 0.0
        """Time that probes may take."""
        self._probes: list[tuple[Tokens, DraftState, list[int]]] = []
        """Probes that may still run: their tokens, their requests, and the tokens of the text."""

    def start(self, request: Request) -> DraftState:
        """The state of a new request, with the acceptance rate of the others."""
        return DraftState(self.rate)

    def plan(self, requests: Sequence[Request], limits: Sequence[int], total: int, rows: int) -> list[int]:
        """The worthwhile number of drafts for requests with all tokens in the draft model; also runs missing tokens."""
        self._read_probes()
        for request in requests:
            self._mark_pages(request)
        states = [_state(request) for request in requests]
        wanted = [min(self.most, self._limit(request)) if total else 0 for request in requests]
        counts = choose_counts([state.rate for state in states], wanted, total, rows, self.times)
        for state, count in zip(states, counts, strict=True):
            state.active = count > 0
        self._catch_up([request for request, count in zip(requests, counts, strict=True) if count])
        if total:  # at full load no rate would change anything
            self._probe([request for request, count in zip(requests, counts, strict=True) if not count], rows)
        return [
            min(count, limit) if len(request.ids) - request.draft_computed <= ROWS else 0
            for request, count, limit in zip(requests, counts, limits, strict=True)
        ]

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """One pass for each draft of the request with most; the host reads the tokens after the last one."""
        began_s = time.perf_counter()
        slices, newest = list[Slice](), dict[int, int]()
        known: list[tuple[DraftState, int] | None] = []
        """For each row of the first pass the text's next token, if it has one already."""
        for i, request in enumerate(requests):
            for at in range(request.draft_computed, len(request.ids)):
                slices.append(self._row(request, at))
                generated = len(request.prompt) <= at + 1 < len(request.ids)
                known.append((_state(request), request.ids[at + 1]) if generated else None)
            newest[i] = len(slices) - 1
        passes, rows = [(self.run(Work(tuple(slices))), newest)], len(slices)
        for depth in range(1, max(counts)):
            deeper = [i for i, count in enumerate(counts) if count > depth]
            before, newest = newest, {i: row for row, i in enumerate(deeper)}
            slices = [self._row(requests[i], len(requests[i].ids) - 1 + depth, -1 - before[i]) for i in deeper]
            passes.append((self.run(Work(tuple(slices))), newest))
            rows += len(slices)
        sampled = [(tokens.tolist(), newest) for tokens, newest in passes]
        self.times.draft.update(rows / len(passes), (time.perf_counter() - began_s) / len(passes))
        for pair, token in zip(known, sampled[0][0], strict=True):
            if pair is not None:
                self._observe(pair[0], right=token == pair[1])
        drafts = []
        for i, request in enumerate(requests):
            drafts.append(self._valid(tokens[newest[i]] for tokens, newest in sampled if i in newest))
            request.draft_computed = len(request.ids) + max(0, len(drafts[-1]) - 1)
        return drafts

    def observe(self, request: Request, accepted: int, refused: bool) -> None:
        """Record the checked drafts."""
        for right in [True] * accepted + [False] * refused:
            self._observe(_state(request), right=right)

    def observe_pass(self, work: Work, launched_s: float) -> None:
        """Measure a pass of the target, whose tokens have just been read; one was launched while the last one ran."""
        now_s = time.perf_counter()
        began_s, self._read_s = max(launched_s, self._read_s), now_s
        if all(len(piece.tokens) == 1 for piece in work.slices):
            self.times.target.update(len(work.slices), now_s - began_s)

    def _observe(self, state: DraftState, *, right: bool) -> None:
        state.rate += RATE_STEP * (right - state.rate)
        self._observed += 1
        self.rate += max(SHARED_RATE_STEP, 1 / self._observed) * (right - self.rate)

    def _limit(self, request: Request) -> int:
        """Drafts that ``request`` can have at most."""
        left = request.limit_tokens - request.generated - request.in_flight - 1
        if len(request.ids) - request.draft_computed > CATCH_UP_TOKENS * left or not self._in_vocabulary(request):
            return 0
        return max(0, min(left, self.context - request.length + 1))

    def _in_vocabulary(self, request: Request) -> bool:
        """Whether the draft model has all tokens of ``request``; the target may have more."""
        state = _state(request)
        if self.vocab_size < self.target_vocab_size:
            while state.checked < len(request.ids) and request.ids[state.checked] < self.vocab_size:
                state.checked += 1
            return state.checked == len(request.ids)
        return True

    def _valid(self, tokens: Iterator[int]) -> list[int]:
        """``tokens`` up to the first invalid one: its logits were not finite, or the target does not have it."""
        valid = list[int]()
        for token in tokens:
            if not 0 <= token < self.target_vocab_size:
                break
            valid.append(token)
        return valid

    # -- the draft model's cache -----------------------------------------------------------------------------------

    def _mark_pages(self, request: Request) -> None:
        """Record the pages that are complete, and continue after those that another request has completed."""
        size, state = self.pool.page_tokens, _state(request)
        complete = min(request.draft_computed, len(request.ids) - 1) // size
        self.pool.drafted.update(request.pages[state.marked : complete])
        state.marked = complete
        if request.draft_computed % size == 0:
            index, last = request.draft_computed // size, (len(request.ids) - 1) // size
            while index < last and request.pages[index] in self.pool.drafted:
                index += 1
            request.draft_computed = max(request.draft_computed, index * size)

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Run the tokens before the newest one that the draft model lacks, as many as the token budget allows."""
        budget, slices = self.token_budget, list[Slice]()
        for request in requests:
            self._mark_pages(request)  # one before may have completed shared pages
            missing = len(request.ids) - 1 - request.draft_computed
            if missing >= ROWS and budget:
                slices.append(self._chunk(request, request.draft_computed + min(missing, budget)))
                budget -= len(slices[-1].tokens)
                self._mark_pages(request)
        if slices:
            self.run(Work(tuple(slices)))

    def _chunk(self, request: Request, end: int) -> Slice:
        """The tokens up to ``end`` that the draft model lacks, without a sample."""
        start, request.draft_computed = request.draft_computed, end
        return Slice(start, tuple(request.ids[start:end]), tuple(request.pages[: self.pool.pages_for(end)]), None)

    def _row(self, request: Request, at: int, token: int | None = None) -> Slice:
        """A decode of the token at position ``at``, sampled as the target samples there."""
        index = at + 1 - len(request.prompt)
        args = sample_args(request, index)._replace(logprobs=-1)
        token = request.ids[at] if token is None else token
        return Slice(at, (token,), tuple(request.pages[: self.pool.pages_for(at + 1)]), args)

    # -- probes ----------------------------------------------------------------------------------------------------

    def _probe(self, requests: Sequence[Request], rows: int) -> None:
        """Compare a request's newest tokens with those of the draft model, if the time budget of probes allows it."""
        each_s = self.times.target_s(rows)
        self._probe_s = min(self._probe_s + PROBE_SHARE * each_s, SAVED_PASSES * each_s)
        samples = min(PROBE_TOKENS, self.max_requests)
        ready = [r for r in requests if r.generated > samples and self._limit(r)]
        if not ready:
            return
        request = max(ready, key=lambda request: len(request.ids) - request.draft_computed)
        missing = len(request.ids) - 1 - request.draft_computed
        if not samples <= missing <= self.token_budget:
            return
        cost_s = self.times.draft_s(missing)
        if cost_s > self._probe_s:
            return
        self._probe_s -= cost_s
        end = len(request.ids) - 1
        chunk = [self._chunk(request, end - samples)] if missing > samples else []
        compared = [self._row(request, at) for at in range(end - samples, end)]
        request.draft_computed = end
        tokens = self.run(Work((*chunk, *compared)))
        self._probes.append((tokens, _state(request), request.ids[end - samples + 1 : end + 1]))

    def _read_probes(self) -> None:
        """Record the last probe's results. It has probably ended: a pass of the target was launched after it."""
        for tokens, state, expected in self._probes:
            for token, right in zip(tokens.tolist(), expected, strict=True):
                self._observe(state, right=token == right)
        self._probes.clear()


def _state(request: Request) -> DraftState:
    assert isinstance(request.drafter, DraftState)
    return request.drafter
