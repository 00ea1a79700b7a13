"""Choices sorted by expert by counting, in Triton: stable, the same bits each time, three launches instead of a sort.

    count     c_be = how many of the choices of program b are expert e's
    prefix    first_be = Σ_{e′ < e} Σ_b c_be′ + Σ_{b′ < b} c_b′e           a running sum over (E + 1) · programs numbers
    place     order[first_be + rank of the choice among its program's of e] = choice

Ranks are running sums of a (BLOCK, E) table of ones and zeros. N choices cost N·E additions in registers and 3N numbers
of memory traffic; a radix sort of 64-bit keys and values moves some 30N. Where there are many blocks a program takes
several, one after another, and carries its counts along: they stand in memory by expert, E + 1 scattered numbers a
program. A choice of expert E or more is none: these come last, in their order, as if they were expert E's.

A decode step has few choices, and three launches cost more than N² comparisons: there each place is the number of
choices that come before, found in one launch by programs that know nothing of each other.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels import permute

FEW = 2048
"""Up to so many choices, those that come before each are counted in one launch."""
TABLE = 4096
"""Comparisons that a program holds at once."""
MOST_EXPERTS = 512
"""With more, a block's table would not fit the registers, and torch's sort does it."""
PROGRAMS, MOST_TURNS = 512, 8
"""Programs take several blocks where there would be more programs than a GPU runs at once; at most so many blocks."""
COUNTED = 1024
"""Choices of a program that only counts."""


@triton.jit
def _ones(ids_ptr, n, N, E, E_PAD: tl.constexpr):
    """(whether each choice is none, table of ones): column e is expert e's; no column for choices of none."""
    ids = tl.load(ids_ptr + n, n < N, E).to(tl.int32)
    return (ids >= E) & (n < N), (ids[:, None] == tl.arange(0, E_PAD)[None, :]).to(tl.int32)


@triton.jit
def _count(ids_ptr, counts_ptr, N, E, programs, TURNS: tl.constexpr, BLOCK: tl.constexpr, E_PAD: tl.constexpr):
    b, e = tl.program_id(0), tl.arange(0, E_PAD)
    counted = tl.zeros((E_PAD,), tl.int32)
    nobodys = tl.zeros((BLOCK,), tl.int32)
    for turn in range(TURNS):
        n = (b * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        none, ones = _ones(ids_ptr, n, N, E, E_PAD)
        counted += tl.sum(ones, 0)
        nobodys += none.to(tl.int32)
    tl.store(counts_ptr + e * programs + b, counted, e < E)
    tl.store(counts_ptr + E * programs + b, tl.sum(nobodys, 0))


@triton.jit
def _place(
    ids_ptr, running_ptr, order_ptr, ends_ptr, N, E, programs,
    TURNS: tl.constexpr, BLOCK: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    b, e = tl.program_id(0), tl.arange(0, E_PAD)
    # What stands before this program's: the running sum of the one before it in the order of (expert, program).
    at = e * programs + b
    first_e = tl.load(running_ptr + at - 1, (e < E) & (at > 0), 0).to(tl.int32)
    after = tl.load(running_ptr + E * programs + b - 1, E * programs + b > 0, 0).to(tl.int32)
    for turn in range(TURNS):
        n = (b * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        none, ones = _ones(ids_ptr, n, N, E, E_PAD)
        ranks = tl.cumsum(ones, 0) - 1 + first_e[None, :]
        place = tl.sum(tl.where(ones > 0, ranks, 0), 1)
        place = tl.where(none, after + tl.cumsum(none.to(tl.int32), 0) - 1, place)
        tl.store(order_ptr + place, n.to(tl.int64), n < N)
        first_e += tl.sum(ones, 0)
        after += tl.sum(none.to(tl.int32), 0)
    if b == 0:
        last = tl.load(running_ptr + (e + 1) * programs - 1, e < E, 0).to(tl.int64)
        tl.store(ends_ptr + e, last, e < E)


@triton.jit
def _tally(ids_ptr, count_ptr, N, E, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """A sum of integers is the same in any order, so it may be atomic."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, BINS)
    ids = tl.minimum(tl.load(ids_ptr + n, n < N, E), E).to(tl.int32)
    counted = tl.histogram(ids, BINS)
    tl.atomic_add(count_ptr + e, counted.to(tl.int64), (e < E) & (counted > 0), sem="relaxed")


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
    ids_N = ids_TA.contiguous().flatten()  # flat alone, one column of several would stay a slice
    N, padded = len(ids_N), max(2, triton.next_power_of_2(experts))
    order_N = torch.empty(N, dtype=torch.int64, device=ids_TA.device)
    if not N:
        return order_N, torch.zeros(experts, dtype=torch.int64, device=ids_TA.device)
    ends_E = torch.empty(experts, dtype=torch.int64, device=ids_TA.device)
    if N <= FEW:
        _rank_few(ids_N, order_N, ends_E)
    else:
        block = max(16, min(256, 8192 // padded))
        turns = min(MOST_TURNS, triton.next_power_of_2(triton.cdiv(triton.cdiv(N, block), PROGRAMS)))
        programs = triton.cdiv(N, block * turns)
        counts = torch.empty(experts + 1, programs, dtype=torch.int32, device=ids_TA.device)
        _count[(programs,)](ids_N, counts, N, experts, programs, turns, block, padded)
        running = counts.flatten().cumsum(0, dtype=torch.int32)
        _place[(programs,)](ids_N, running, order_N, ends_E, N, experts, programs, turns, block, padded)
    return order_N, ends_E


@_sort.register_fake
def _(ids_TA, experts):
    return ids_TA.new_empty(ids_TA.numel(), dtype=torch.int64), ids_TA.new_empty(experts, dtype=torch.int64)


def sort(ids_TA: Tensor, experts: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """(order_R, ends_E) (see :func:`permute.sort`)."""
    if experts > MOST_EXPERTS:
        return permute.sort(ids_TA, experts, rows)
    order_R, ends_E = _sort(ids_TA, experts)
    return (order_R if rows is None else order_R[:rows]), ends_E


@torch.library.custom_op("colonnade::count_choices", mutates_args=())
def _counted(ids_TA: Tensor, experts: int) -> Tensor:
    ids_N, count_E = ids_TA.contiguous().flatten(), torch.zeros(experts, dtype=torch.int64, device=ids_TA.device)
    if len(ids_N):
        bins = triton.next_power_of_2(experts + 1)
        _tally[triton.cdiv(len(ids_N), COUNTED),](ids_N, count_E, len(ids_N), experts, COUNTED, bins)
    return count_E


@_counted.register_fake
def _(ids_TA, experts):
    return ids_TA.new_empty(experts, dtype=torch.int64)


def count(ids_TA: Tensor, experts: int) -> Tensor:
    """count_E (see :func:`permute.count`)."""
    return permute.count(ids_TA, experts) if experts > MOST_EXPERTS else _counted(ids_TA, experts)
