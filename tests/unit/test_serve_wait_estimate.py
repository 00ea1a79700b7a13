"""The estimate of a new request's wait, from the admissions so far."""

import pytest

from colonnade.serve.wait_estimate import WaitEstimate


def test_without_admissions_nothing_is_expected():
    estimate = WaitEstimate()
    assert estimate.expected_s(5.0, 100) == 0
    estimate.observe(5.0, 3, 0)
    assert estimate.expected_s(9.0, 100) == 0, "requests that do not wait say nothing about the queue"


def test_the_mean_time_between_admissions():
    estimate = WaitEstimate()
    estimate.observe(0.0, 4, 100)
    for step in range(1, 20):
        estimate.observe(0.5 * step, 1, 100)
    assert estimate.expected_s(9.5, 10) == pytest.approx(5.0)
    estimate.observe(11.5, 4, 100)  # four at once after 2 s
    assert estimate.expected_s(11.5, 10) == pytest.approx(5.0)
    for step in range(1, 60):
        estimate.observe(11.5 + 0.1 * step, 1, 100)
    assert estimate.expected_s(17.4, 10) == pytest.approx(1.0, rel=0.02), "old admissions are forgotten"


def test_a_stall_counts_from_the_last_admission():
    estimate = WaitEstimate()
    estimate.observe(0.0, 1, 5)
    estimate.observe(1.0, 1, 5)
    estimate.observe(4.0, 0, 5)
    assert estimate.expected_s(11.0, 1) == pytest.approx(10.0)
    estimate.observe(12.0, 1, 0)
    assert estimate.expected_s(100.0, 1) < 12, "nothing waits: time passes without meaning"
