"""Drafts in the scheduler: what is kept of them, and what is not."""

import pytest

from colonnade.serve import speculation
from colonnade.serve.page_pool import PagePool
from colonnade.serve.request import Request
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.scheduler import Scheduler
from colonnade.serve.speculation import NgramSpeculator


def test_a_page_with_the_key_of_a_refused_draft_is_not_cached(monkeypatch: pytest.MonkeyPatch):
    """The 12th token ends the request; the pass that sampled it has stored the key of a draft in its place."""
    monkeypatch.setattr(speculation, "MIN_RATE", 0.0)
    scheduler = Scheduler(PagePool(9, 4), max_requests=9, token_budget=64, max_waiting=1, speculator=NgramSpeculator(4))
    prompt = (7, 8, 9, 7, 8, 9, 7, 8, 9, 7)
    request = Request(id="a", prompt=prompt, params=SamplingParams(), seed=0, limit_tokens=9)
    scheduler.add(request)
    assert [token for _, token, _ in scheduler.commit(scheduler.schedule(), [8])] == [8]
    work = scheduler.schedule()
    assert [piece.tokens for piece in work.slices] == [(8,), (9,)], "one draft"
    for grown, token, _ in scheduler.commit(work, [5, 6]):
        assert token == 5
        scheduler.finish(grown)
    assert len(request.ids) == 12 and len(request.page_hashes) <= 3
    assert len(scheduler.pool.find_cached(request.page_hashes)) == 2
