"""Rate limits of an API key as token buckets; pure arithmetic, the caller passes the time.

A bucket holds one minute's allowance and is refilled continuously, so with a limit of n per minute, at most n·(1 +
t/60) are taken in any t seconds. The number of tokens of a request is not known on arrival: it is accepted while the
bucket holds at least one, its tokens are taken as they are processed, and a bucket overdrawn that way refuses further
requests until it has refilled. In the long run the rate is exact.
"""

from dataclasses import dataclass
from typing import NamedTuple

MINUTE_S = 60.0

ROUNDING = 1e-6
"""Units that may be missing, because a refill is rounded."""


class TokenBucket:
    """At most ``per_minute`` units per minute, on average and in a burst."""

    def __init__(self, per_minute: int, now_s: float):
        self.per_minute = per_minute
        self._level, self._filled_s = float(per_minute), now_s

    def level(self, now_s: float) -> float:
        """Units that may be taken; negative if it is overdrawn."""
        refill = (now_s - self._filled_s) * self.per_minute / MINUTE_S
        self._level, self._filled_s = min(self.per_minute, self._level + refill), now_s
        return self._level

    def take(self, units: int, now_s: float) -> None:
        """Take ``units``, even if this overdraws the bucket."""
        self._level = self.level(now_s) - units

    def wait_s(self, units: float, now_s: float) -> float:
        """Time until it holds ``units``, if nothing else is taken."""
        missing = units - self.level(now_s)
        return missing * MINUTE_S / self.per_minute if missing > ROUNDING else 0.0


@dataclass(frozen=True)
class Limits:
    """The limits of one key; None for none."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


class Excess(NamedTuple):
    """A limit that a request would exceed."""

    name: str
    """"requests", "tokens" or "concurrent requests"."""
    limit: int
    wait_s: float | None
    """Time until a request is accepted; None if that depends on when others end."""


class RateLimiter:
    """Counts the requests and tokens of one key."""

    def __init__(self, limits: Limits, now_s: float):
        self.limits, self.active = limits, 0
        """``active`` is the number of requests under way."""
        self._buckets = {
            name: TokenBucket(limit, now_s)
            for name, limit in (("requests", limits.requests_per_minute), ("tokens", limits.tokens_per_minute))
            if limit is not None
        }

    def start(self, now_s: float) -> Excess | None:
        """Count a request that begins, unless it would exceed a limit: that with the longest wait is returned."""
        waits = {name: bucket.wait_s(1, now_s) for name, bucket in self._buckets.items()}
        name = max(waits, key=lambda name: waits[name], default="")
        if waits and waits[name] > 0:
            return Excess(name, self._buckets[name].per_minute, waits[name])
        most = self.limits.concurrent_requests
        if most is not None and self.active >= most:
            return Excess("concurrent requests", most, None)
        self.active += 1
        if requests := self._buckets.get("requests"):
            requests.take(1, now_s)
        return None

    def end(self) -> None:
        """Count a request that ends."""
        self.active -= 1

    def take_tokens(self, count: int, now_s: float) -> None:
        """Count tokens of a prompt or a completion."""
        if bucket := self._buckets.get("tokens"):
            bucket.take(count, now_s)

    def headers(self, now_s: float) -> dict[str, str]:
        """OpenAI's headers: the limit, what is left of it, and the time until all of it is back."""
        values = {}
        for name, bucket in self._buckets.items():
            values[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
            values[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level(now_s))))
            values[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.per_minute, now_s):.3f}s"
        return values
