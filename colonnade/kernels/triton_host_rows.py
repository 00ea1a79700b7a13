"""Rows of a table in mapped host memory, read and written by a kernel over the bus, like TorchRec's UVM tables.

No host thread is involved, and there is no staging buffer. A few programs keep enough bytes in flight to saturate the
bus and leave the other multiprocessors free for computation.
"""

import triton
from torch import Tensor
from triton import language as tl

PROGRAMS = 8
BLOCK_NUMBERS = 8192
"""Numbers that a program has in flight."""


@triton.jit
def _copy_rows(host_ptr, rows_ptr, copy_ptr, U, D, BU: tl.constexpr, BD: tl.constexpr, WRITE: tl.constexpr):
    d = tl.arange(0, BD)
    for block in range(tl.program_id(0), tl.cdiv(U, BU), tl.num_programs(0)):
        u = block * BU + tl.arange(0, BU)
        row = tl.load(rows_ptr + u, u < U, 0).to(tl.int64)
        mask = (u < U)[:, None] & (d < D)[None, :]
        host = host_ptr + row[:, None] * D + d[None, :]
        copy = copy_ptr + u.to(tl.int64)[:, None] * D + d[None, :]
        if WRITE:
            tl.store(host, tl.load(copy, mask), mask)
        else:
            tl.store(copy, tl.load(host, mask), mask)


def copy_rows(host_RD: Tensor, rows_U: Tensor, copy_UD: Tensor, *, write: bool) -> None:
    """As :func:`colonnade.kernels.host_rows.copy_rows`, without waiting."""
    U, D = copy_UD.shape
    assert host_RD.is_contiguous()
    assert copy_UD.is_contiguous()
    if U and D:
        BD = triton.next_power_of_2(D)
        BU = max(1, BLOCK_NUMBERS // BD)
        _copy_rows[min(PROGRAMS, triton.cdiv(U, BU)),](host_RD, rows_U, copy_UD, U, D, BU, BD, write, num_warps=8)
