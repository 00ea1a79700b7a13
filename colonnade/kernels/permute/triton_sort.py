"""Choices sorted by expert by counting, in Triton: stable, the same bits each time, three launches instead of a sort.

    count     c_be = how many of the choices of block b are expert e's
    prefix    first_be = Σ_{e′ < e} Σ_b c_be′ + Σ_{b′ < b} c_b′e           one running sum over (E + 1) · blocks numbers
    place     order[first_be + rank of the choice among its block's of e] = choice

A block's ranks are a running sum of its (BLOCK, E) table of ones and zeros. N choices cost N·E additions in registers
and 3N numbers of memory traffic; a radix sort of 64-bit keys and values moves some 30N. A choice of expert E or more
is none: these come last, in their order, as if they were expert E's.

A decode step has few choices, and three launches cost more than N² comparisons: there each place is the number of
choices that come before, found in one launch by programs that know nothing of each other.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.permute import reference

FEW = 2048
"""Up to so many choices, those that come before each are counted in one launch."""
TABLE = 4096
"""Comparisons that a program holds at once."""
MOST_EXPERTS = 512
"""With more, a block's table would not fit the registers, and torch's sort does it."""


@triton.jit
def _ones(ids_ptr, n, N, E, E_PAD: tl.constexpr):
    """(expert of each choice, table of ones): column e is expert e's; no column for choices of none."""
    ids = tl.load(ids_ptr + n, n < N, E).to(tl.int32)
    return ids, (ids[:, None] == tl.arange(0, E_PAD)[None, :]).to(tl.int32)


@triton.jit
def _count(ids_ptr, counts_ptr, N, E, blocks, BLOCK: tl.constexpr, E_PAD: tl.constexpr):
    b = tl.program_id(0)
    n = b * BLOCK + tl.arange(0, BLOCK)
    ids, ones = _ones(ids_ptr, n, N, E, E_PAD)
    e = tl.arange(0, E_PAD)
    tl.store(counts_ptr + e * blocks + b, tl.sum(ones, 0), e < E)
    tl.store(counts_ptr + E * blocks + b, tl.sum(((ids >= E) & (n < N)).to(tl.int32), 0))


@triton.jit
def _place(ids_ptr, running_ptr, order_ptr, ends_ptr, N, E, blocks, BLOCK: tl.constexpr, E_PAD: tl.constexpr):
    b = tl.program_id(0)
    n = b * BLOCK + tl.arange(0, BLOCK)
    ids, ones = _ones(ids_ptr, n, N, E, E_PAD)
    e = tl.arange(0, E_PAD)
    # What stands before this block's: the running sum of the one before it in the order of (expert, block).
    at = e * blocks + b
    first_e = tl.load(running_ptr + at - 1, (e < E) & (at > 0), 0).to(tl.int32)
    ranks = tl.cumsum(ones, 0) - 1 + first_e[None, :]
    place = tl.sum(tl.where(ones > 0, ranks, 0), 1)
    none = (ids >= E) & (n < N)
    after = tl.load(running_ptr + E * blocks + b - 1, E * blocks + b > 0, 0).to(tl.int32)
    place = tl.where(none, after + tl.cumsum(none.to(tl.int32), 0) - 1, place)
    tl.store(order_ptr + place, n.to(tl.int64), n < N)
    if b == 0:
        last = tl.load(running_ptr + (e + 1) * blocks - 1, e < E, 0).to(tl.int64)
        tl.store(ends_ptr + e, last, e < E)


@triton.jit
def _rank(ids_ptr, order_ptr, ends_ptr, N, E, BI: tl.constexpr, BE: tl.constexpr, BJ: tl.constexpr):
    """Where BI choices stand, and where BE experts' end."""
    n = tl.program_id(0) * BI + tl.arange(0, BI)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    mine = tl.minimum(tl.load(ids_ptr + n, n < N, E), E).to(tl.int32)
    before = tl.zeros((BI, BJ), tl.int32)
    within = tl.zeros((BE, BJ), tl.int32)
    for j0 in range(0, N, BJ):
        j = j0 + tl.arange(0, BJ)
        # Those past the last are after all that there are.
        other = tl.where(j < N, tl.minimum(tl.load(ids_ptr + j, j < N, E), E), E + 1).to(tl.int32)
        same = (other[None, :] == mine[:, None]) & (j[None, :] < n[:, None])
        before += ((other[None, :] < mine[:, None]) | same).to(tl.int32)
        within += (other[None, :] <= e[:, None]).to(tl.int32)
    tl.store(order_ptr + tl.sum(before, 1), n.to(tl.int64), n < N)
    tl.store(ends_ptr + e, tl.sum(within, 1).to(tl.int64), e < E)


def _rank_few(ids_N: Tensor, order_N: Tensor, ends_E: Tensor) -> None:
    N, E = len(ids_N), len(ends_E)
    wide = max(16, min(1024, triton.next_power_of_2(N)))
    high = min(16, TABLE // wide)
    blocks = max(triton.cdiv(N, high), triton.cdiv(E, TABLE // wide))
    _rank[(blocks,)](ids_N, order_N, ends_E, N, E, high, triton.next_power_of_2(triton.cdiv(E, blocks)), wide)


@torch.library.custom_op("colonnade::sort_choices", mutates_args=())
def _sort(ids_TA: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    ids_N = ids_TA.flatten()
    N, padded = len(ids_N), max(2, triton.next_power_of_2(experts))
    order_N = torch.empty(N, dtype=torch.int64, device=ids_TA.device)
    if not N:
        return order_N, torch.zeros(experts, dtype=torch.int64, device=ids_TA.device)
    ends_E = torch.empty(experts, dtype=torch.int64, device=ids_TA.device)
    if N <= FEW:
        _rank_few(ids_N, order_N, ends_E)
    else:
        block = max(16, min(256, 8192 // padded))
        blocks = triton.cdiv(N, block)
        counts = torch.empty(experts + 1, blocks, dtype=torch.int32, device=ids_TA.device)
        _count[(blocks,)](ids_N, counts, N, experts, blocks, block, padded)
        running = counts.flatten().cumsum(0, dtype=torch.int32)
        _place[(blocks,)](ids_N, running, order_N, ends_E, N, experts, blocks, block, padded)
    return order_N, ends_E


@_sort.register_fake
def _(ids_TA, experts):
    return ids_TA.new_empty(ids_TA.numel(), dtype=torch.int64), ids_TA.new_empty(experts, dtype=torch.int64)


def sort(ids_TA: Tensor, experts: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """(order_R, ends_E) (see :func:`reference.sort`)."""
    if experts > MOST_EXPERTS:
        return reference.sort(ids_TA, experts, rows)
    order_R, ends_E = _sort(ids_TA, experts)
    return (order_R if rows is None else order_R[:rows]), ends_E
