"""Token buckets: the rate holds over any interval, and the announced wait is exact."""

from hypothesis import given
from hypothesis import strategies as st

from colonnade.serve.api.rate_limit import Limits, RateLimiter

GAPS = st.lists(st.floats(0, 30), min_size=1, max_size=60)


@given(st.integers(1, 100), GAPS)
def test_requests_stay_within_the_rate_over_any_interval(limit: int, gaps: list[float]):
    limiter, now_s, accepted = RateLimiter(Limits(requests_per_minute=limit), 0.0), 0.0, []
    for gap in gaps:
        now_s += gap
        excess = limiter.start(now_s)
        if excess is None:
            accepted.append(now_s)
        else:
            assert excess.name == "requests" and excess.limit == limit and excess.wait_s
    for i, first_s in enumerate(accepted):
        for j, last_s in enumerate(accepted[i:], 1):
            assert j <= limit * (1 + (last_s - first_s) / 60) + 1e-3


@given(st.integers(1, 1000), st.integers(1, 100), st.integers(1, 5000), st.floats(0.001, 100))
def test_the_announced_wait_is_exact(tokens: int, requests: int, taken: int, early_s: float):
    limits = Limits(requests_per_minute=requests, tokens_per_minute=tokens)
    for wait_for in ("less", "all"):
        limiter = RateLimiter(limits, 0.0)
        assert limiter.start(0.0) is None
        limiter.take_tokens(taken, 0.0)
        excess = limiter.start(0.0)
        if excess is None:
            return
        assert excess.wait_s is not None
        if wait_for == "all":
            assert limiter.start(excess.wait_s) is None
        elif excess.wait_s > early_s:
            assert limiter.start(excess.wait_s - early_s) is not None or early_s * max(tokens, requests) / 60 < 1e-3


def test_headers_tell_limit_rest_and_reset():
    limiter = RateLimiter(Limits(requests_per_minute=60, tokens_per_minute=600, concurrent_requests=2), 100.0)
    assert limiter.start(100.0) is None
    limiter.take_tokens(700, 100.0)
    assert limiter.headers(101.0) == {
        "x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "60",
        "x-ratelimit-reset-requests": "0.000s", "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "69.000s",
    }  # fmt: skip
    assert RateLimiter(Limits(), 0.0).headers(1.0) == {}


def test_concurrent_requests_end():
    limiter = RateLimiter(Limits(concurrent_requests=2, requests_per_minute=100), 0.0)
    assert limiter.start(0.0) is limiter.start(0.0) is None
    assert limiter.start(0.0) == ("concurrent requests", 2, None)
    assert limiter.headers(0.0)["x-ratelimit-remaining-requests"] == "98", "a refused request is not counted"
    limiter.end()
    assert limiter.start(0.0) is None
