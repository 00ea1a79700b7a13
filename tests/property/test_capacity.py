"""Expert capacity: the worked example, which choices are dropped, and when none may be."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from colonnade.config import MoeConfig
from colonnade.errors import ConfigError
from colonnade.kernels.permute import combine, gather, sort
from colonnade.model.moe import RouterOutput
from colonnade.model.moe.capacity import KeptChoices, apply_capacity, capacity
from colonnade.parallel.axis import SOLO

EXAMPLE_LOADS = [55, 5, 0, 1, 1, 1, 0, 1]
"""T = 64 tokens by the expert that each chose, of E = 8 (Tutel's example)."""


def config(E: int, A: int, factor: float | None, *, priority: bool = False) -> MoeConfig:
    return MoeConfig(experts=E, active=A, ffn_width=4, capacity=factor, priority=priority)


def kept_choices(ids: list[list[int]], order: list[int], E: int, C: int) -> set[tuple[int, int]]:
    """The (token, choice) pairs that get a slot, filling the experts in order: first choices first."""
    filled, kept = [0] * E, set()
    for j in range(len(ids[0]) if ids else 0):
        for t in order:
            if ids[t][j] < E:
                if filled[ids[t][j]] < C:
                    kept.add((t, j))
                filled[ids[t][j]] += 1
    return kept


def tutel_capacity(ids: list[list[int]], E: int, factor: float) -> int:
    """C as Tutel's example computes it, but after sorting the tokens (which the example omits)."""
    A = len(ids[0])
    loads = [sum(row.count(e) for row in ids) for e in range(E)]
    samples_per_expert = (len(ids) + E - 1) // E
    if factor > 0:
        return A * int(factor * samples_per_expert)
    if factor == 0:
        return max(loads)
    return min(max(loads), A * int(-factor * samples_per_expert))


@pytest.mark.parametrize(
    ("factor", "C", "dropped"), [(1, 8, 47), (1.25, 10, 45), (0, 55, 0), (-2, 16, 39), (-8, 55, 0)]
)
def test_worked_example(factor, C, dropped):
    assert capacity(factor, 1, 64, 8, largest=max(EXAMPLE_LOADS)) == C
    ids_TA = torch.repeat_interleave(torch.arange(8), torch.tensor(EXAMPLE_LOADS))[:, None]
    ids_TA = ids_TA[torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    choice = RouterOutput(ids_TA, torch.ones(64, 1), torch.rand(64, 8))
    for priority in (False, True):
        admitted = apply_capacity(choice, torch.arange(64), config(8, 1, factor, priority=priority), SOLO)
        assert (admitted.ids_TA == 8).sum() == dropped


@pytest.mark.parametrize(
    ("multiple", "C"), [(1, 55), (2, 56), (8, 56), (64, 64), (256, 256), (257, 384), (384, 384), (385, 512)]
)
def test_capacity_is_rounded_up_to_the_multiple(multiple, C):
    assert capacity(0, 1, 64, 8, largest=55, multiple=multiple) == C


@st.composite
def choices(draw: st.DrawFn) -> tuple[RouterOutput, torch.Tensor, int]:
    """(choices of distinct experts, some of them none, the tokens' indices in any order, E)."""
    E, T = draw(st.integers(1, 7)), draw(st.integers(0, 24))
    A = draw(st.integers(1, E))
    rows = [draw(st.permutations(range(E)))[:A] for _ in range(T)]
    skewed = draw(st.booleans())  # towards the first experts, so that some are dropped
    ids = [sorted(row) if skewed else row for row in rows]
    none = draw(st.lists(st.booleans(), min_size=T, max_size=T))
    ids = [[*row[:-1], E] if lost and A > 1 else list(row) for row, lost in zip(ids, none, strict=True)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    ids_TA = torch.tensor(ids, dtype=torch.int64).view(T, A)
    weights_TA = (torch.rand(T, A, generator=generator, dtype=torch.float64) + 0.1) * (ids_TA < E)
    # Few distinct probabilities, so that ties are common.
    probs_TE = torch.randint(1, 4, (T, E), generator=generator).double() / 4
    return RouterOutput(ids_TA, weights_TA, probs_TE), torch.randperm(T, generator=generator) * 3 + 5, E


factors = st.sampled_from([1.0, 1.25, 0.5, 2.0, 0.0, -1.0, -1.5, -0.5, -8.0])


@given(choices(), factors, st.booleans())
def test_dropped_choices_match_the_reference(drawn, factor, priority):
    choice, index_T, E = drawn
    ids, A = choice.ids_TA.tolist(), choice.ids_TA.shape[1]
    moe = config(E, A, factor, priority=priority)
    if ids and factor and not int(abs(factor) * math.ceil(len(ids) / E)):
        with pytest.raises(ConfigError, match="0 slots in every expert"):
            apply_capacity(choice, index_T, moe, SOLO)
        return
    top = choice.probs_TE.max(1).values.tolist() if ids else []
    order = sorted(range(len(ids)), key=lambda t: (-top[t] if priority else 0, index_T[t].item()))
    kept = kept_choices(ids, order, E, tutel_capacity(ids, E, factor)) if ids else set()
    admitted = apply_capacity(choice, index_T, moe, SOLO)
    for t, row in enumerate(ids):
        for j, e in enumerate(row):
            here = (t, j) in kept
            assert admitted.ids_TA[t, j] == (e if here else E)
            assert admitted.weights_TA[t, j] == (choice.weights_TA[t, j] if here else 0)


@given(choices(), st.booleans(), st.sampled_from([None, 0.0]))
def test_large_enough_capacity_drops_nothing(drawn, priority, factor):
    """Without a capacity, and with that of the largest load, in any order; Tutel has a known defect here."""
    choice, index_T, E = drawn
    ids_TA = choice.ids_TA
    admitted = apply_capacity(choice, index_T, config(E, ids_TA.shape[1], factor, priority=priority), SOLO)
    assert torch.equal(admitted.ids_TA, ids_TA)
    assert torch.equal(admitted.weights_TA, choice.weights_TA)
    # The largest load as an explicit factor: every slot index is below it in any order.
    largest = max([(ids_TA == e).sum().item() for e in range(E)], default=0)
    assert capacity(0.0, ids_TA.shape[1], len(ids_TA), E, largest=largest) == largest
    enough = config(E, ids_TA.shape[1], -float(max(largest, 1)), priority=priority)
    assert torch.equal(apply_capacity(choice, index_T, enough, SOLO).ids_TA, ids_TA)


@given(choices(), st.sampled_from([1.0, 1.5, -1.0]), st.booleans())
def test_first_choice_is_never_dropped_for_a_second(drawn, factor, priority):
    choice, index_T, E = drawn
    A = choice.ids_TA.shape[1]
    admitted = apply_capacity(choice, index_T, config(E, A, factor, priority=priority), SOLO)
    lost_TA = (admitted.ids_TA == E) & (choice.ids_TA < E)
    for e in range(E):
        lost_rank = [j for j in range(A) if lost_TA[choice.ids_TA[:, j] == e, j].any()]
        kept_rank = [j for j in range(A) if (admitted.ids_TA[:, j] == e).any()]
        if lost_rank and kept_rank:
            assert max(kept_rank) <= min(lost_rank)


@given(choices(), st.sampled_from([None, 0.0, 1.0, -1.5]))
def test_dispatch_then_combine_is_the_identity_on_kept_tokens(drawn, factor):
    """With unit weights and one choice per token; a dropped token comes back as 0."""
    choice, index_T, E = drawn
    choice = choice._replace(ids_TA=choice.ids_TA[:, :1], weights_TA=torch.ones(len(choice.ids_TA), 1).double())
    admitted = apply_capacity(choice, index_T, config(E, 1, factor), SOLO)
    x_TD = torch.arange(1.0, 1 + 3 * len(index_T), dtype=torch.float64).view(-1, 3)
    order_R, ends_E = sort(admitted.ids_TA, E)
    x_RD = gather(x_TD, order_R, 1)
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    assert sizes == [(admitted.ids_TA == e).sum().item() for e in range(E)]
    y_TD = combine(x_RD, order_R, admitted.weights_TA)
    kept_T1 = admitted.ids_TA < E
    assert torch.equal(y_TD, x_TD * kept_T1)


@given(choices(), st.permutations(range(24)))
def test_token_order_in_memory_changes_nothing(drawn, shuffle):
    choice, index_T, E = drawn
    T, A = choice.ids_TA.shape
    moe = config(E, A, 1.0, priority=True)
    admitted = apply_capacity(choice, index_T, moe, SOLO)
    by = torch.tensor([t for t in shuffle if t < T], dtype=torch.int64)
    moved = apply_capacity(RouterOutput(*(part[by] for part in choice[:3])), index_T[by], moe, SOLO)
    assert isinstance(moved, KeptChoices)
    assert torch.equal(moved.ids_TA, admitted.ids_TA[by])


def test_zero_capacity_error_names_the_remedy():
    choice = RouterOutput(torch.zeros(9, 1, dtype=torch.int64), torch.ones(9, 1), torch.ones(9, 8))
    with pytest.raises(
        ConfigError,
        match=r"capacity of 0\.3 leaves int\(0\.3·⌈9/8⌉\) = 0 slots.* raise it to 1 .* model\.moe\.capacity of a run",
    ):
        apply_capacity(choice, torch.arange(9), config(8, 1, 0.3), SOLO)
    none = RouterOutput(*(part[:0] for part in choice[:3]))
    assert apply_capacity(none, torch.arange(0), config(8, 1, 0.3), SOLO).ids_TA.shape == (0, 1)
