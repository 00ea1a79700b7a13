"""AdamW over all weights in one Triton launch; a program updates 16,384 elements of one weight.

Tensors are found through a table of pointers, uploaded in each step (20 kB for 500 weights, from pinned memory,
without blocking), because autograd allocates gradients at new addresses. The division of weights among
programs never changes and stays on the device. A flat buffer would save nothing: autograd would have to copy each
gradient into it.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.adamw import ParameterState

BLOCK, ITERATIONS, WARPS = 512, 32, 4
"""Elements per iteration, iterations of a program, warps.

4 elements per thread are 16 bytes of float32, in 56 registers (8 take 106, and a detour through shared memory); 32
iterations amortise the lookups in the pointer table."""
ALIGNED_BYTES = 16
"""Width of a thread's vector loads, used if all tensors are aligned to it."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class _Moments(NamedTuple):
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    eps: float


@triton.jit
def _update_block(g_ptr, w_ptr, m_ptr, v_ptr, copy_ptr, has_copy, start, n, a, b, c, factor, moments,
                  BLOCK: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    beta1, rest1, beta2, rest2, eps = moments
    lane = tl.arange(0, BLOCK)
    mask = None if WHOLE else lane < n - start
    g = tl.load(g_ptr + start + lane, mask).to(tl.float32) * factor
    m = tl.load(m_ptr + start + lane, mask) * beta1 + g * rest1
    v = tl.load(v_ptr + start + lane, mask) * beta2 + g * g * rest2
    # IEEE division and square root, as in the reference; the kernel is bound by memory anyway.
    w = tl.load(w_ptr + start + lane, mask) * a - tl.div_rn(m * b, tl.sqrt_rn(v) * c + eps)
    tl.store(m_ptr + start + lane, m, mask)
    tl.store(v_ptr + start + lane, v, mask)
    tl.store(w_ptr + start + lane, w, mask)
    if has_copy:
        tl.store(copy_ptr + start + lane, w.to(copy_ptr.dtype.element_ty), mask)


@triton.jit
def _adamw(table_ptr, sizes_ptr, program_weight_ptr, first_program_ptr, a_ptr, b_ptr, c_ptr, factor_ptr, skip_ptr, P,
           moments, GRADIENT: tl.constexpr, COPY: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
           ITERATIONS: tl.constexpr):  # fmt: skip
    if tl.load(skip_ptr) > 0:
        return
    p = tl.load(program_weight_ptr + tl.program_id(0))
    n = tl.load(sizes_ptr + p)
    g_ptr = tl.multiple_of(tl.load(table_ptr + p).to(tl.pointer_type(GRADIENT)), ALIGN)
    w_ptr = tl.multiple_of(tl.load(table_ptr + P + p).to(tl.pointer_type(tl.float32)), ALIGN)
    m_ptr = tl.multiple_of(tl.load(table_ptr + 2 * P + p).to(tl.pointer_type(tl.float32)), ALIGN)
    v_ptr = tl.multiple_of(tl.load(table_ptr + 3 * P + p).to(tl.pointer_type(tl.float32)), ALIGN)
    copy = tl.load(table_ptr + 4 * P + p)
    copy_ptr = tl.multiple_of(copy.to(tl.pointer_type(COPY)), ALIGN)
    a, b, c, factor = tl.load(a_ptr + p), tl.load(b_ptr + p), tl.load(c_ptr + p), tl.load(factor_ptr)
    first = (tl.program_id(0) - tl.load(first_program_ptr + p)).to(tl.int64) * ITERATIONS
    for iteration in range(ITERATIONS):
        start = (first + iteration) * BLOCK
        if start + BLOCK <= n:
            _update_block(g_ptr, w_ptr, m_ptr, v_ptr, copy_ptr, copy != 0, start, n, a, b, c, factor,
                          moments, BLOCK, WHOLE=True)  # fmt: skip
        elif start < n:
            _update_block(g_ptr, w_ptr, m_ptr, v_ptr, copy_ptr, copy != 0, start, n, a, b, c, factor,
                          moments, BLOCK, WHOLE=False)  # fmt: skip


@functools.cache
def _partition(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:
    """(size of each weight, weight of each program, first program of each weight, number of programs)."""
    sizes_P = torch.tensor(sizes)
    counts_P = -(-sizes_P // (BLOCK * ITERATIONS))
    program_weight = torch.repeat_interleave(torch.arange(len(sizes)), counts_P).int()
    first_P = (counts_P.cumsum(0) - counts_P).int()
    return sizes_P.to(device), program_weight.to(device), first_P.to(device), len(program_weight)


def _pointer_table(weights: Sequence[ParameterState], device: torch.device) -> tuple[Tensor, int]:
    """(int64 (5, P) pointers on ``device``, their common alignment in bytes); 0 stands for no tensor."""
    rows = [[0 if x is None else x.data_ptr() for x in column] for column in zip(*weights, strict=True)]
    aligned = all(address % ALIGNED_BYTES == 0 for row in rows for address in row)
    table = torch.tensor(rows)
    table = (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)
    return table, ALIGNED_BYTES if aligned else 2


def _match_strides(gradient: Tensor, master: Tensor) -> Tensor:
    """``gradient`` with the strides of ``master``."""
    if gradient.stride() == master.stride():
        return gradient
    return torch.empty_like(master, dtype=gradient.dtype).copy_(gradient)


def adamw(
    weights: Sequence[ParameterState],
    a_P: Tensor,
    b_P: Tensor,
    c_P: Tensor,
    factor: Tensor,
    skip: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """As :func:`adamw.adamw`, bit for bit, for float32 masters (a CPU's square root may differ by one ulp)."""
    if not weights:
        return
    # The kernel indexes memory linearly; this list keeps the copies alive until the launch is queued.
    weights = [weight._replace(gradient=_match_strides(weight.gradient, weight.master)) for weight in weights]
    gradient_dtypes = {weight.gradient.dtype for weight in weights}
    copy_dtypes = {weight.copy.dtype for weight in weights if weight.copy is not None} or {torch.float32}
    assert len(gradient_dtypes) == len(copy_dtypes) == 1, (
        "gradients have one type, and so have the weights to compute with"
    )
    assert all(x is None or x.stride() == weight.master.stride() for weight in weights for x in weight)
    device = weights[0].master.device
    sizes_P, program_weight, first_P, programs = _partition(tuple(weight.master.numel() for weight in weights), device)
    if not programs:
        return
    table, align = _pointer_table(weights, device)
    _adamw[(programs,)](
        table, sizes_P, program_weight, first_P, a_P, b_P, c_P, factor, skip, len(weights),
        _Moments(beta1, 1 - beta1, beta2, 1 - beta2, eps),
        GRADIENT=TYPES[gradient_dtypes.pop()], COPY=TYPES[copy_dtypes.pop()], ALIGN=align, BLOCK=BLOCK,
        ITERATIONS=ITERATIONS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
