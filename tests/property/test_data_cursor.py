"""Sample order: a permutation at every size, new for each epoch and seed, without pattern, seekable."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data.loader import Cursor, permute

sizes = st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 1025, 4096, 5000]))
seeds = st.integers(-(2**63), 2**64)


@given(sizes, seeds, st.integers(0, 2**40))
def test_every_epoch_is_a_permutation(samples, seed, epoch):
    order = permute(np.arange(samples), samples, seed, epoch)
    assert sorted(order.tolist()) == list(range(samples))


@pytest.mark.parametrize("samples", [1, 2, 3, 257])
def test_sizes_that_are_no_power_of_two(samples):
    assert sorted(Cursor(samples, 5).at(0, samples).tolist()) == list(range(samples))


@given(sizes, seeds, st.integers(0, 10_000), st.lists(st.integers(0, 40), max_size=8))
def test_seeking_equals_reading_on(samples, seed, seen, counts):
    cursor = Cursor(samples, seed)
    at_once = cursor.at(seen, sum(counts))
    starts = itertools.accumulate(counts, initial=seen)
    in_parts = [i for start, count in zip(starts, counts, strict=False) for i in cursor.at(start, count).tolist()]
    assert at_once.tolist() == in_parts


@pytest.mark.slow
@given(st.integers(1, 50), st.integers(1, 130), st.integers(0, 5))
def test_batches_longer_than_an_epoch_see_each_sample_equally_often(samples, batch, step):
    counts = np.bincount(Cursor(samples).indices(step, batch), minlength=samples)
    assert counts.max() - counts.min() <= 1 + (batch % samples > 0)
    assert counts.sum() == batch


def test_each_epoch_has_every_sample_once_in_a_new_order():
    cursor = Cursor(257, 3)
    first, second = cursor.at(0, 257), cursor.at(257, 257)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(257))
    assert (first == second).mean() < 0.05


def test_seeds_give_different_orders():
    orders = {tuple(Cursor(20, seed).at(0, 20).tolist()) for seed in range(200)}
    assert len(orders) == 200


@pytest.mark.sample(2)
@pytest.mark.parametrize("samples", [2, 3, 4])
def test_small_sets_have_all_orders_equally_often(samples):
    draws = 60 * math.factorial(samples)
    seen = Counter(tuple(permute(np.arange(samples), samples, seed, 0).tolist()) for seed in range(draws))
    assert len(seen) == math.factorial(samples)
    expected = draws / len(seen)
    chi2 = sum((count - expected) ** 2 / expected for count in seen.values())
    degrees_of_freedom = len(seen) - 1
    assert chi2 < degrees_of_freedom + 4 * math.sqrt(2 * degrees_of_freedom)  # four standard deviations of a fair draw


def test_each_sample_is_equally_likely_at_each_position():
    n, draws = 16, 800
    table = np.zeros((n, n))
    for seed in range(draws):
        table[np.arange(n), permute(np.arange(n), n, seed, 0)] += 1
    chi2, degrees_of_freedom = ((table - draws / n) ** 2 / (draws / n)).sum(), (n - 1) ** 2
    assert chi2 < degrees_of_freedom + 4 * math.sqrt(2 * degrees_of_freedom)


def test_neighbours_do_not_stay_neighbours():
    n = 5000
    steps = np.diff(permute(np.arange(n), n, 7, 0)) % n
    assert np.bincount(steps, minlength=n).max() < 9  # about 1 each; a pattern would repeat one step many times


def test_seeking_far_is_cheap():
    far = Cursor(10**12, 1)
    assert len(set(far.at(10**15, 64).tolist())) == 64
