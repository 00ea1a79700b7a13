"""``merge`` is associative and commutative, has an identity, and finite gradients for empty states."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.kernels.attention.reference import attend
from colonnade.kernels.softmax_state import State, identity, merge, merge_all
from tests.worlds import assert_same


def states(seed: int, count: int, empty: list[bool]) -> list[State]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        o = torch.randn(3, 2, 5, generator=generator, dtype=torch.float64)
        lse = 8 * torch.randn(3, 2, generator=generator, dtype=torch.float64)
        made.append(identity(o) if empty[i] else State(o, lse))
    return made


def assert_states(a: State, b: State) -> None:
    assert_same(a.o, b.o, 1e-12)
    assert torch.equal(a.lse == -torch.inf, b.lse == -torch.inf)
    finite = a.lse > -torch.inf
    assert_same(a.lse[finite], b.lse[finite], 1e-12)


drawn_states = st.tuples(st.integers(0, 10**6), st.lists(st.booleans(), min_size=3, max_size=6))


@given(drawn_states)
@settings(max_examples=60, deadline=None)
def test_merge_is_associative_commutative_and_has_an_identity(drawn: tuple[int, list[bool]]) -> None:
    seed, empty = drawn
    parts = states(seed, len(empty), empty)
    a, b, c = parts[:3]
    assert_states(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_states(merge(a, b), merge(b, a))
    assert_states(merge(a, identity(a.o)), a)
    folded = identity(a.o)
    for part in parts:
        folded = merge(folded, part)
    assert_states(folded, merge_all(parts))
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()
    assert_states(merge_all([parts[i] for i in order]), folded)


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(0, 12), st.sampled_from([None, 1, 3]))
@settings(max_examples=40, deadline=None)
def test_merging_parts_equals_attention_over_all_keys(seed: int, T: int, cut: int, window: int | None) -> None:
    """Values and gradients of attention over two parts of the keys, merged."""
    generator = torch.Generator().manual_seed(seed)
    S = 12
    q, k, v = (torch.randn(n, h, 4, generator=generator, dtype=torch.float64) for n, h in ((T, 6), (S, 3), (S, 3)))
    results = []
    for split in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        q_, k_, v_ = leaves
        if split:
            parts = [attend(q_, k_[a:b], v_[a:b], causal=False) for a, b in ((0, cut), (cut, S))]
            state = merge_all(parts)
        else:
            state = attend(q_, k_, v_, causal=False)
        (state.o.pow(2).sum() + state.lse.sin().sum()).backward()
        results.append((state, [x.grad for x in leaves]))
    assert_states(State(*(x.detach() for x in results[0][0])), State(*(x.detach() for x in results[1][0])))
    for ours, reference in zip(results[1][1], results[0][1], strict=True):
        assert_same(ours, reference)


@pytest.mark.parametrize("empty", [[True, False, False], [False, True, True], [True, True, True]])
def test_gradients_of_empty_states_are_finite(empty: list[bool]) -> None:
    parts = [State(s.o.requires_grad_(), s.lse.requires_grad_()) for s in states(0, 3, empty)]
    merged = merge_all(parts)
    assert not merged.o.isnan().any()
    merged.o.sum().backward()
    for part, void in zip(parts, empty, strict=True):
        assert part.o.grad is not None
        assert part.lse.grad is not None
        assert part.o.grad.isfinite().all()
        assert part.lse.grad.isfinite().all()
        if void:
            assert part.o.grad.abs().max() == 0


def test_gradcheck() -> None:
    o = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    lse = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def merged(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = merge_all([State(a, b) for a, b in zip(o, lse, strict=True)])
        return state.o, state.lse

    assert torch.autograd.gradcheck(merged, (o, lse))
