"""Ring attention on a GPU: chunks merged as on four ranks equal float64 attention."""

import pytest
import torch

from colonnade.kernels.attention import chunk, reference
from colonnade.kernels.softmax_state import State, merge
from colonnade.model.attend import Packed
from colonnade.model.context_parallel import zigzag_shards

BOUND = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
"""Relative norm against float64; backward inputs are rounded twice, the output once."""


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("kv", [8, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[512, 512], [700, 1, 0, 323]], ids=["equal", "ragged"])
def test_merged_chunks_equal_attention(dtype: torch.dtype, kv: int, causal: bool, lengths: list[int]) -> None:
    ranks, N, H, T = 4, 8, 64, sum(lengths)
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (torch.randn(T, n, H, generator=draw, device="cuda").to(dtype) for n in (N, kv, kv, N))
    packed = Packed.of(lengths, "cuda", causal=causal)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    want = reference.packed(*exact, packed.cu_seqlens, longest=packed.longest, equal=packed.equal, causal=causal)
    want.backward(do.double())
    assert all(x.grad is not None for x in exact)
    shards = zigzag_shards(packed, T, ranks)
    o, dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (q, q, k, v))
    for me, mine in enumerate(shards):
        at = mine.both.index_T
        calls = []
        for rank, theirs in enumerate(shards):
            there = theirs.both.index_T
            if not causal or rank == me:
                calls.append((at, there, mine.both, theirs.both, causal))
            elif rank < me:
                calls.append((at, theirs.early(there), mine.both, theirs.first, False))
            else:
                calls.append((mine.late(at), there, mine.second, theirs.both, False))
        whole = State(torch.zeros(T, N, H, device="cuda"), torch.full((T, N), -torch.inf, device="cuda"))
        for rows, cols, queries, keys, diagonal in calls:
            part = chunk.flash_forward(q[rows], k[cols], v[cols], queries, keys, causal=diagonal)
            merged = merge(State(whole.o[rows], whole.lse[rows]), part)
            whole.o[rows], whole.lse[rows] = merged.o, merged.lse
        o[at] = whole.o[at].double()
        for rows, cols, queries, keys, diagonal in calls:
            a, b, c = chunk.flash_backward(
                do[rows], q[rows], k[cols], v[cols], whole.o[rows], whole.lse[rows], queries, keys, causal=diagonal
            )
            dq[rows] += a.double()
            dk[cols] += b.double()
            dv[cols] += c.double()
    for name, got, x in (
        ("o", o, want),
        ("dq", dq, exact[0].grad),
        ("dk", dk, exact[1].grad),
        ("dv", dv, exact[2].grad),
    ):
        error = ((got - x).norm() / x.norm()).item()
        assert error < BOUND[dtype], f"{name}: {error:.2g}"
