"""Tensors next to inaccessible guard pages, so that an out-of-bounds access ends the process.

For interpreted kernels, like ``compute-sanitizer`` on a GPU. Linux only; elsewhere tensors are returned unchanged.
"""

import ctypes
import functools
import itertools
import mmap
import sys
import weakref

import torch
from torch import Tensor

ANONYMOUS, READ_WRITE, NO_ACCESS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if sys.platform == "linux" else 0, 3, 0
_sides = itertools.cycle((True, False))


@functools.cache
def _libc() -> ctypes.CDLL:
    """libc with argument types of its memory calls."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    return libc


def guarded(x: Tensor) -> Tensor:
    """A copy of a CPU tensor that alternately ends or begins at a guard page; non-contiguous ones unchanged."""
    size = x.numel() * x.element_size()
    if sys.platform != "linux" or x.is_cuda or not size or not x.is_contiguous():
        return x
    libc, page = _libc(), mmap.PAGESIZE
    room = -(-size // page) * page
    base = libc.mmap(None, room + 2 * page, READ_WRITE, ANONYMOUS, -1, 0)
    assert base != ctypes.c_void_p(-1).value, f"cannot map {room + 2 * page} bytes: errno {ctypes.get_errno()}"
    for wall in (base, base + page + room):
        assert libc.mprotect(wall, page, NO_ACCESS) == 0, f"errno {ctypes.get_errno()}"
    held = (ctypes.c_char * size).from_address(base + page + (room - size if next(_sides) else 0))
    weakref.finalize(held, libc.munmap, base, room + 2 * page)
    made = torch.frombuffer(held, dtype=torch.uint8).view(x.dtype).view(x.shape)
    return made.copy_(x)


def main() -> None:
    """Read one element past a tensor's end or before its start, for the test that this ends the process."""
    end, begin = (guarded(torch.arange(10, dtype=torch.int32)) for _ in range(2))
    assert end.tolist() == begin.tolist() == list(range(10))
    print("guarded", flush=True)
    ctypes.string_at(end.data_ptr() + 40 if sys.argv[1] == "end" else begin.data_ptr() - 4, 4)
    print("not guarded", flush=True)


if __name__ == "__main__":
    main()
