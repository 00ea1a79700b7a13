"""Counting sort of token choices by expert in Triton: stable, deterministic, three launches.

    count     c_be = how many choices of program b are expert e's
    prefix    first_be = Σ_{e′ < e} Σ_b c_be′ + Σ_{b′ < b} c_b′e           a cumulative sum over (E + 1) · programs
    scatter   order[first_be + rank of the choice among its program's of e] = choice

Ranks are cumulative sums of a (BLOCK, E) one-hot table. N choices cost N·E additions in registers and 3N numbers of
memory traffic; a radix sort of 64-bit keys and values moves about 30N. If there are many blocks, a program processes
several in sequence and carries its counts along: counts are stored by expert, E + 1 scattered numbers per program.
Choices of expert E or more are unused and sorted last, in their order.

A decode step has few choices, and three launches cost more than N² comparisons: there each choice's rank is the number
of choices before it, counted in one launch of independent programs.

A choice's position among those of its expert, which capacity needs, is its rank without the other experts' choices.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels import permute

SMALL = 2048
"""Up to this many choices the sort is one launch of pairwise comparisons."""
COMPARISONS = 4096
"""Comparisons that a program holds at a time."""
MAX_EXPERTS = 512
"""With more experts a block's table would not fit the registers; torch sorts instead."""
PROGRAMS, MAX_BLOCKS_PER_PROGRAM = 512, 8
"""Programs process several blocks if there are more blocks than a GPU runs at the same time, up to a maximum."""
HISTOGRAM_BLOCK = 1024
"""Choices per program of the histogram kernel."""


@triton.jit
def _one_hot(ids_ptr, n, N, E, E_PAD: tl.constexpr):
    """(which choices are unused, one-hot table (BLOCK, E_PAD)); unused choices have no column."""
    ids = tl.load(ids_ptr + n, n < N, E).to(tl.int32)
    return (ids >= E) & (n < N), (ids[:, None] == tl.arange(0, E_PAD)[None, :]).to(tl.int32)


@triton.jit
def _count(ids_ptr, counts_ptr, N, E, programs, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr, E_PAD: tl.constexpr):
    b, e = tl.program_id(0), tl.arange(0, E_PAD)
    counts = tl.zeros((E_PAD,), tl.int32)
    unused = tl.zeros((BLOCK,), tl.int32)
    for iteration in range(ITERATIONS):
        n = (b * ITERATIONS + iteration) * BLOCK + tl.arange(0, BLOCK)
        none, ones = _one_hot(ids_ptr, n, N, E, E_PAD)
        counts += tl.sum(ones, 0)
        unused += none.to(tl.int32)
    tl.store(counts_ptr + e * programs + b, counts, e < E)
    tl.store(counts_ptr + E * programs + b, tl.sum(unused, 0))


@triton.jit
def _scatter(
    ids_ptr, running_ptr, order_ptr, ends_ptr, N, E, programs,
    ITERATIONS: tl.constexpr, BLOCK: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    b, e = tl.program_id(0), tl.arange(0, E_PAD)
    # The start of this program's range: the cumulative sum of its predecessor in (expert, program) order.
    at = e * programs + b
    first_e = tl.load(running_ptr + at - 1, (e < E) & (at > 0), 0).to(tl.int32)
    after = tl.load(running_ptr + E * programs + b - 1, E * programs + b > 0, 0).to(tl.int32)
    for iteration in range(ITERATIONS):
        n = (b * ITERATIONS + iteration) * BLOCK + tl.arange(0, BLOCK)
        none, ones = _one_hot(ids_ptr, n, N, E, E_PAD)
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
def _rank(
    ids_ptr, running_ptr, position_ptr, N, E, programs,
    ITERATIONS: tl.constexpr, BLOCK: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """Positions among the choices of the same expert; ``running`` are sums over programs, for each expert."""
    b, e = tl.program_id(0), tl.arange(0, E_PAD)
    first_e = tl.load(running_ptr + e * programs + b - 1, e < tl.where(b > 0, E, 0), 0).to(tl.int32)
    for iteration in range(ITERATIONS):
        n = (b * ITERATIONS + iteration) * BLOCK + tl.arange(0, BLOCK)
        _, ones = _one_hot(ids_ptr, n, N, E, E_PAD)
        ranks = tl.cumsum(ones, 0) - 1 + first_e[None, :]
        tl.store(position_ptr + n, tl.sum(tl.where(ones > 0, ranks, 0), 1).to(tl.int64), n < N)
        first_e += tl.sum(ones, 0)


@triton.jit
def _histogram(ids_ptr, count_ptr, N, E, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Atomic adds of integers are deterministic."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, BINS)
    ids = tl.minimum(tl.load(ids_ptr + n, n < N, E), E).to(tl.int32)
    counts = tl.histogram(ids, BINS)
    tl.atomic_add(count_ptr + e, counts.to(tl.int64), (e < E) & (counts > 0), sem="relaxed")


@triton.jit
def _sort_by_counting(ids_ptr, order_ptr, ends_ptr, N, E, BI: tl.constexpr, BE: tl.constexpr, BJ: tl.constexpr):
    """Ranks of BI choices, and the ends of BE experts."""
    n = tl.program_id(0) * BI + tl.arange(0, BI)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    own = tl.minimum(tl.load(ids_ptr + n, n < N, E), E).to(tl.int32)
    before = tl.zeros((BI, BJ), tl.int32)
    within = tl.zeros((BE, BJ), tl.int32)
    for j0 in range(0, N, BJ):
        j = j0 + tl.arange(0, BJ)
        # Padding sorts after all choices.
        other = tl.where(j < N, tl.minimum(tl.load(ids_ptr + j, j < N, E), E), E + 1).to(tl.int32)
        same = (other[None, :] == own[:, None]) & (j[None, :] < n[:, None])
        before += ((other[None, :] < own[:, None]) | same).to(tl.int32)
        within += (other[None, :] <= e[:, None]).to(tl.int32)
    tl.store(order_ptr + tl.sum(before, 1), n.to(tl.int64), n < N)
    tl.store(ends_ptr + e, tl.sum(within, 1).to(tl.int64), e < E)


def _sort_small(ids_N: Tensor, order_N: Tensor, ends_E: Tensor) -> None:
    N, E = len(ids_N), len(ends_E)
    wide = max(16, min(1024, triton.next_power_of_2(N)))
    high = min(16, COMPARISONS // wide)
    blocks = max(triton.cdiv(N, high), triton.cdiv(E, COMPARISONS // wide))
    _sort_by_counting[(blocks,)](
        ids_N, order_N, ends_E, N, E, high, triton.next_power_of_2(triton.cdiv(E, blocks)), wide
    )


def _counted(ids_N: Tensor, experts: int) -> tuple[Tensor, tuple[int, int, int]]:
    """(int32 (E + 1, programs): each program's choices by expert; its iterations, their block, padded experts)."""
    N, padded = len(ids_N), max(2, triton.next_power_of_2(experts))
    block = max(16, min(256, 8192 // padded))
    iterations = min(MAX_BLOCKS_PER_PROGRAM, triton.next_power_of_2(triton.cdiv(triton.cdiv(N, block), PROGRAMS)))
    programs = triton.cdiv(N, block * iterations)
    counts = torch.empty(experts + 1, programs, dtype=torch.int32, device=ids_N.device)
    _count[(programs,)](ids_N, counts, N, experts, programs, iterations, block, padded)
    return counts, (iterations, block, padded)


def _sort_eagerly(ids_TA: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    ids_N = ids_TA.contiguous().flatten()  # flatten() alone would keep the stride of a column slice
    N = len(ids_N)
    order_N = torch.empty(N, dtype=torch.int64, device=ids_TA.device)
    if not N:
        return order_N, torch.zeros(experts, dtype=torch.int64, device=ids_TA.device)
    ends_E = torch.empty(experts, dtype=torch.int64, device=ids_TA.device)
    if N <= SMALL:
        _sort_small(ids_N, order_N, ends_E)
    else:
        counts, cut = _counted(ids_N, experts)
        running = counts.flatten().cumsum(0, dtype=torch.int32)
        _scatter[(counts.shape[1],)](ids_N, running, order_N, ends_E, N, experts, counts.shape[1], *cut)
    return order_N, ends_E


_sort = torch.library.custom_op("colonnade::sort_by_expert", _sort_eagerly, mutates_args=())
"""The operator is for torch.compile; calling the function itself takes half the time on the host."""


@_sort.register_fake
def _(ids_TA, experts):
    return ids_TA.new_empty(ids_TA.numel(), dtype=torch.int64), ids_TA.new_empty(experts, dtype=torch.int64)


def sort(ids_TA: Tensor, experts: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """(order_R, ends_E) (see :func:`permute.sort`)."""
    if experts > MAX_EXPERTS:
        return permute.sort(ids_TA, experts, rows)
    run = _sort if torch.compiler.is_compiling() else _sort_eagerly
    order_R, ends_E = run(ids_TA, experts)
    return (order_R if rows is None else order_R[:rows]), ends_E


def _count_eagerly(ids_TA: Tensor, experts: int) -> Tensor:
    ids_N, count_E = ids_TA.contiguous().flatten(), torch.zeros(experts, dtype=torch.int64, device=ids_TA.device)
    if len(ids_N):
        bins = triton.next_power_of_2(experts + 1)
        _histogram[triton.cdiv(len(ids_N), HISTOGRAM_BLOCK),](
            ids_N, count_E, len(ids_N), experts, HISTOGRAM_BLOCK, bins
        )
    return count_E


_count_by_expert = torch.library.custom_op("colonnade::count_by_expert", _count_eagerly, mutates_args=())


@_count_by_expert.register_fake
def _(ids_TA, experts):
    return ids_TA.new_empty(experts, dtype=torch.int64)


def count(ids_TA: Tensor, experts: int) -> Tensor:
    """count_E (see :func:`permute.count`)."""
    if experts > MAX_EXPERTS:
        return permute.count(ids_TA, experts)
    return (_count_by_expert if torch.compiler.is_compiling() else _count_eagerly)(ids_TA, experts)


def _rank_eagerly(ids_TA: Tensor, experts: int) -> Tensor:
    ids_N, (T, A) = ids_TA.T.contiguous().flatten(), ids_TA.shape
    position_N = torch.empty(len(ids_N), dtype=torch.int64, device=ids_TA.device)
    if len(ids_N):
        counts, cut = _counted(ids_N, experts)
        running = counts.cumsum(1, dtype=torch.int32)
        _rank[(counts.shape[1],)](ids_N, running, position_N, len(ids_N), experts, counts.shape[1], *cut)
    return position_N.view(A, T).T


_positions = torch.library.custom_op("colonnade::queue_positions", _rank_eagerly, mutates_args=())


@_positions.register_fake
def _(ids_TA, experts):
    return ids_TA.new_empty(ids_TA.shape[::-1], dtype=torch.int64).T


def positions(ids_TA: Tensor, experts: int) -> Tensor:
    """position_TA (see :func:`permute.positions`)."""
    if experts > MAX_EXPERTS:
        return permute.positions(ids_TA, experts)
    return (_positions if torch.compiler.is_compiling() else _rank_eagerly)(ids_TA, experts)
