"""Chooses how many tokens a draft model drafts for each request, from measured times and acceptance rates.

With an acceptance rate r a request's i-th draft is generated with a probability of r^i (Leviathan 2023, §3.1). It costs
a row of the draft model's i-th pass, and a row of the pass that checks it. Drafts are added as long as that increases

    expected tokens / time of the passes        tokens = requests + Σ r^i        time = target(rows) + Σ_i draft(rows_i)

over all requests of a step. The benefit of a request's drafts decreases, so each depth is tried once, the most probable
drafts first. Other implementations draft a fixed number of tokens, or decide by the acceptance rate alone; but on a CPU
a pass of 8 rows takes 3 times as long as one of 1 row, and on a GPU the same time, so it must be measured.

Pure Python without a clock: the caller measures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from colonnade.serve.batch_rows import padded_batch_size

MIN_GAIN = 1.05
"""Minimum expected speed-up at which drafts are tried."""

DECAY = 0.99
"""Weight of the passes before, for each new one."""

ROW_VARIANCE = 0.05
"""Added to the variance of the row counts, so that a slope that passes of one size cannot show is 0."""

OUTLIER = 3.0
"""A pass counts as at most this multiple of the expected time: another process may have interrupted this one."""

MIN_PASSES = 3
"""Minimum number of measured passes before the line is used."""


class PassTime:
    """The time of a pass of n rows, as a line fitted to recent passes: least squares, older passes count less."""

    def __init__(self):
        self.passes = 0
        """Measured so far."""
        self.base_s = self.row_s = 0.0
        self._sizes = set[int]()
        self._sums = [0.0] * 5

    def __call__(self, rows: float) -> float:
        """Time of a pass of ``rows`` rows [s]."""
        return self.base_s + self.row_s * rows

    def update(self, rows: float, seconds: float) -> None:
        """Record a pass. The first one of each padded size is skipped: kernels are compiled, graphs captured."""
        size = padded_batch_size(max(1, round(rows)), 1 << 30)
        if size not in self._sizes:
            self._sizes.add(size)
            return
        if self.passes >= MIN_PASSES:
            seconds = min(seconds, OUTLIER * self(rows))
        self.passes += 1
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = [DECAY * old + value for old, value in zip(self._sums, new, strict=True)]
        weight, x, y, xx, xy = self._sums
        variance = xx / weight - (x / weight) ** 2 + ROW_VARIANCE
        self.row_s = max(0.0, (xy / weight - x * y / weight**2) / variance)
        self.base_s = (y - self.row_s * x) / weight
        if self.base_s < 0:
            self.base_s, self.row_s = 0.0, y / x


@dataclass
class PassTimes:
    """Times of the target's decode passes and of the draft model's, or estimates until both have been measured."""

    ratio: float
    """Bytes of the draft model's weights to those of the target."""
    row_share: float = 0.0
    """How much longer a pass takes for each row, to that of one row, until it is measured."""
    target: PassTime = field(default_factory=PassTime)
    draft: PassTime = field(default_factory=PassTime)

    @property
    def measured(self) -> bool:
        """Whether both models have been timed."""
        return min(self.target.passes, self.draft.passes) >= MIN_PASSES

    def target_s(self, rows: int) -> float:
        """Time of a decode pass of the target; in units of one, if it has not been measured."""
        return self.target(rows) if self.measured else 1.0 + self.row_share * (rows - 1)

    def draft_s(self, rows: int) -> float:
        """Time of a pass of the draft model in the same units."""
        return self.draft(rows) if self.measured else self.ratio * (1.0 + self.row_share * (rows - 1))


def choose_counts(rates: Sequence[float], limits: Sequence[int], total: int, rows: int, times: PassTimes) -> list[int]:
    """The number of drafts for each request, at most its limit and ``total`` together; all 0 if drafts do not pay.

    ``rates`` are the requests' acceptance rates; without drafts the pass has ``rows`` rows.
    """
    counts, left = [0] * len(rates), total
    if not left:
        return counts
    tokens, seconds = float(rows), times.target_s(rows)
    plain = tokens / seconds
    draft_row_s = times.draft_s(2) - times.draft_s(1)
    row_s = times.target_s(rows + 1) - seconds + draft_row_s
    pass_s = times.draft_s(1) - draft_row_s
    for depth in range(1, max(limits, default=0) + 1):
        deeper = [i for i, limit in enumerate(limits) if limit >= depth == counts[i] + 1]
        gains = sorted(((rates[i] ** depth, i) for i in deeper), reverse=True)[:left]
        best, chosen, gain = (tokens, seconds), 0, 0.0
        for number, (each, _) in enumerate(gains, 1):
            gain += each
            more = tokens + gain, seconds + pass_s + number * row_s
            if more[0] * best[1] > best[0] * more[1]:
                best, chosen = more, number
        if not chosen:
            break
        for _, i in gains[:chosen]:
            counts[i] = depth
        (tokens, seconds), left = best, left - chosen
    return counts if tokens / seconds >= MIN_GAIN * plain else [0] * len(rates)
