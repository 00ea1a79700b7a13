"""One launch for all weights: each program moves 16,384 numbers of one of them.

Where the tensors lie is told by a table of addresses, sent anew in each step (20 kB for 500 weights, from pinned
memory: nobody waits), because autograd's gradients lie elsewhere each time. How the weights are cut up never changes
and stays on the device. A flat buffer would cost what it saves: autograd would have to add each gradient into it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import functools
from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.adamw import Weight

BLOCK, TURNS, WARPS = 512, 32, 4
"""Numbers at once, turns of a program, warps: 4 numbers a thread are 16 bytes of float32, in 56 registers (8 take 106,
and a detour through shared memory); the way through the table is paid once in 32 turns."""
ALIGNED_BYTES = 16
"""What a thread reads at once, where all tensors begin at such an address."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _move(g_ptr, w_ptr, m_ptr, v_ptr, copy_ptr, rounds, start, n, a, b, c, factor, beta1, rest1, beta2, rest2, eps,
          BLOCK: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    here = None if WHOLE else lane < n - start
    g = tl.load(g_ptr + start + lane, here).to(tl.float32) * factor
    m = tl.load(m_ptr + start + lane, here) * beta1 + g * rest1
    v = tl.load(v_ptr + start + lane, here) * beta2 + g * g * rest2
    # Divided and rooted to the last bit, as the reference is; memory is what takes the time.
    w = tl.load(w_ptr + start + lane, here) * a - tl.div_rn(m * b, tl.sqrt_rn(v) * c + eps)
    tl.store(m_ptr + start + lane, m, here)
    tl.store(v_ptr + start + lane, v, here)
    tl.store(w_ptr + start + lane, w, here)
    if rounds:
        tl.store(copy_ptr + start + lane, w.to(copy_ptr.dtype.element_ty), here)


@triton.jit
def _kernel(table_ptr, sizes_ptr, of_ptr, first_ptr, a_ptr, b_ptr, c_ptr, factor_ptr, skip_ptr, P,
            beta1, rest1, beta2, rest2, eps,
            GRADIENT: tl.constexpr, COPY: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
            TURNS: tl.constexpr):  # fmt: skip
    if tl.load(skip_ptr) > 0:
        return
    p = tl.load(of_ptr + tl.program_id(0))
    n = tl.load(sizes_ptr + p)
    g_ptr = tl.multiple_of(tl.load(table_ptr + p).to(tl.pointer_type(GRADIENT)), ALIGN)
    w_ptr = tl.multiple_of(tl.load(table_ptr + P + p).to(tl.pointer_type(tl.float32)), ALIGN)
    m_ptr = tl.multiple_of(tl.load(table_ptr + 2 * P + p).to(tl.pointer_type(tl.float32)), ALIGN)
    v_ptr = tl.multiple_of(tl.load(table_ptr + 3 * P + p).to(tl.pointer_type(tl.float32)), ALIGN)
    copy = tl.load(table_ptr + 4 * P + p)
    copy_ptr = tl.multiple_of(copy.to(tl.pointer_type(COPY)), ALIGN)
    a, b, c, factor = tl.load(a_ptr + p), tl.load(b_ptr + p), tl.load(c_ptr + p), tl.load(factor_ptr)
    first = (tl.program_id(0) - tl.load(first_ptr + p)).to(tl.int64) * TURNS
    for turn in range(TURNS):
        start = (first + turn) * BLOCK
        if start + BLOCK <= n:
            _move(g_ptr, w_ptr, m_ptr, v_ptr, copy_ptr, copy != 0, start, n, a, b, c, factor,
                  beta1, rest1, beta2, rest2, eps, BLOCK, WHOLE=True)  # fmt: skip
        elif start < n:
            _move(g_ptr, w_ptr, m_ptr, v_ptr, copy_ptr, copy != 0, start, n, a, b, c, factor,
                  beta1, rest1, beta2, rest2, eps, BLOCK, WHOLE=False)  # fmt: skip


@functools.cache
def _cut(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:
    """(size of each weight, the weight of each program, the first program of each weight, programs)."""
    sizes_P = torch.tensor(sizes)
    counts_P = -(-sizes_P // (BLOCK * TURNS))
    of = torch.repeat_interleave(torch.arange(len(sizes)), counts_P).int()
    first_P = (counts_P.cumsum(0) - counts_P).int()
    return sizes_P.to(device), of.to(device), first_P.to(device), len(of)


def _addresses(weights: Sequence[Weight], device: torch.device) -> tuple[Tensor, int]:
    """(int64 (5, P) on ``device``, the bytes that all of them are multiples of); 0 is no tensor."""
    rows = [[0 if x is None else x.data_ptr() for x in column] for column in zip(*weights, strict=True)]
    aligned = all(address % ALIGNED_BYTES == 0 for row in rows for address in row)
    table = torch.tensor(rows)
    table = (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)
    return table, ALIGNED_BYTES if aligned else 2


def _like(gradient: Tensor, master: Tensor) -> Tensor:
    """``gradient`` laid out in memory as ``master`` is."""
    if gradient.stride() == master.stride():
        return gradient
    return torch.empty_like(master, dtype=gradient.dtype).copy_(gradient)


def adamw(
    weights: Sequence[Weight],
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
    """As :func:`reference.adamw`, bit for bit (a CPU's roots are an ulp off at times), for float32 masters."""
    if not weights:
        return
    # The kernel goes through memory in order; this list keeps a copy alive until it is under way.
    weights = [weight._replace(gradient=_like(weight.gradient, weight.master)) for weight in weights]
    kinds = {weight.gradient.dtype for weight in weights}
    copies = {weight.copy.dtype for weight in weights if weight.copy is not None} or {torch.float32}
    assert len(kinds) == len(copies) == 1, "gradients have one type, and so have the weights to compute with"
    assert all(x is None or x.stride() == weight.master.stride() for weight in weights for x in weight)
    device = weights[0].master.device
    sizes_P, of, first_P, programs = _cut(tuple(weight.master.numel() for weight in weights), device)
    if not programs:
        return
    table, align = _addresses(weights, device)
    _kernel[(programs,)](
        table, sizes_P, of, first_P, a_P, b_P, c_P, factor, skip, len(weights),
        beta1, 1 - beta1, beta2, 1 - beta2, eps,
        GRADIENT=TYPES[kinds.pop()], COPY=TYPES[copies.pop()], ALIGN=align, BLOCK=BLOCK, TURNS=TURNS,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
