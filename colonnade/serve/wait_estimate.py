"""Estimates how long a new request will wait before it is admitted.

    expected wait = admissions up to and including its own × mean time between admissions while requests wait

The mean is exponential, over about the last :data:`AVERAGED_ADMISSIONS` admissions; while none happens it is at least
the time since the last one. Pure Python without a clock.
"""

AVERAGED_ADMISSIONS = 10
"""Admissions after which an older one counts e times less."""


class WaitEstimate:
    """Observes admissions. Times are seconds on any clock that never goes back."""

    def __init__(self):
        self._mean_s: float | None = None
        """Mean time between admissions."""
        self._since_s: float | None = None
        """The last admission, or later the moment when requests began to wait; None while none waits."""

    def observe(self, now_s: float, admitted: int, waiting: int) -> None:
        """Record a step that admitted ``admitted`` requests and left ``waiting``."""
        if admitted and self._since_s is not None:
            interval_s = (now_s - self._since_s) / admitted
            keep = (1 - 1 / AVERAGED_ADMISSIONS) ** admitted
            self._mean_s = interval_s if self._mean_s is None else keep * self._mean_s + (1 - keep) * interval_s
        if not waiting:
            self._since_s = None
        elif admitted or self._since_s is None:
            self._since_s = now_s

    def expected_s(self, now_s: float, admissions: int) -> float:
        """Time until that many requests have been admitted."""
        since_s = 0.0 if self._since_s is None else now_s - self._since_s
        return admissions * max(self._mean_s or 0.0, since_s)
