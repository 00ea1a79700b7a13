"""How many tokens are drafted, for measured times and acceptance rates."""

from itertools import product

import pytest

from colonnade.serve.draft_planner import MIN_GAIN, PassTime, PassTimes, choose_counts


def times(base: float, row: float, draft_base: float, draft_row: float) -> PassTimes:
    """Times of passes on these lines."""
    it = PassTimes(0.1)
    for rows in (1, 1, 1, 4, 4, 16, 16, 16, 8, 8):
        it.target.update(rows, base + row * rows)
        it.draft.update(rows, draft_base + draft_row * rows)
    assert it.measured
    return it


def speed(rates: list[float], counts: tuple[int, ...], rows: int, given: PassTimes) -> float:
    """Expected tokens per second."""
    tokens = rows + sum(rate**i for rate, count in zip(rates, counts, strict=True) for i in range(1, count + 1))
    seconds = given.target_s(rows + sum(counts))
    for depth in range(1, max(counts) + 1):
        seconds += given.draft_s(sum(count >= depth for count in counts))
    return tokens / seconds


@pytest.mark.parametrize(
    "line", [(1, 0, 0.1, 0), (1, 0.3, 0.1, 0.03), (0.2, 1, 0.02, 0.1), (1, 0.01, 0.5, 0), (1, 0, 1, 0)]
)
@pytest.mark.parametrize("rates", [[0.9], [0.6, 0.6], [0.95, 0.5, 0.1], [0.0, 0.0], [1.0, 0.3]], ids=str)
def test_counts_are_nearly_the_best(line: tuple[float, ...], rates: list[float]):
    given, rows = times(*line), len(rates) + 1
    counts = tuple(choose_counts(rates, [4] * len(rates), 99, rows, given))
    every = product(range(5), repeat=len(rates))
    none = (0,) * len(rates)
    best = max(speed(rates, each, rows, given) for each in every)
    got, plain = speed(rates, counts, rows, given), speed(rates, none, rows, given)
    if best < MIN_GAIN * plain:
        assert counts == none
    else:
        assert got >= 0.97 * best


def test_limits_hold():
    given = times(1, 0, 0.01, 0)
    assert choose_counts([0.9, 0.9, 0.9], [2, 0, 9], 99, 3, given)[:2] == [2, 0]
    assert sum(choose_counts([0.9] * 8, [5] * 8, 11, 8, given)) == 11
    assert choose_counts([0.9], [5], 0, 1, given) == [0] and choose_counts([], [], 5, 1, given) == []


def test_before_any_pass_is_measured_the_weights_decide():
    assert choose_counts([0.7], [4], 9, 1, PassTimes(0.05)) == [4]
    assert choose_counts([0.7], [4], 9, 1, PassTimes(0.95)) == [0]
    assert choose_counts([0.7], [4], 9, 1, PassTimes(0.3, row_share=0.25)) == [1], "a CPU: each row takes time"
    assert choose_counts([0.7] * 9, [4] * 9, 99, 9, PassTimes(0.3, row_share=0.25)) == [0] * 9


def test_a_line_is_fitted_and_follows_changes():
    line = PassTime()
    for rows in (1, 2, 9, 1, 2, 9, 4, 1, 2, 9):
        line.update(rows, 3 + 0.5 * rows)
    assert line.passes == 6, "not the first of a size"
    assert line(20) == pytest.approx(13, rel=0.03)
    line.update(9, 1000.0)
    assert line(9) < 2 * 7.5, "an outlier counts for little"
    for _ in range(300):
        line.update(9, 1.0)
    assert line(9) == pytest.approx(1, rel=0.1)
    assert line.row_s >= 0 and line.base_s >= 0
