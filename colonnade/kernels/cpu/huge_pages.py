"""Memory in huge pages for weights, so that reading them misses the TLB 512 times less often.

A decode step reads all weights once. With pages of 4 KiB, one core of an Intel Xeon reads memory at 10 to 13 GB/s, with
pages of 2 MiB at 14 to 15. The kernel gives huge pages only to memory that asks for them (``madvise``), and only where
2 MiB are contiguous: tensors that are allocated one by one get none.
"""

import contextlib
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 2 << 20
"""Bytes of a huge page on x86-64, and on ARM with pages of 4 KiB."""
LINE = 64
"""Tensors begin at multiples of so many bytes: a cache line."""


def arena_bytes(tensors: Sequence[Tensor]) -> int:
    """The size of an :class:`Arena` for ``tensors``."""
    return sum(-(-x.nbytes // LINE) * LINE for x in tensors)


class Arena:
    """One range of memory in huge pages, if the kernel has any; it lives as long as a tensor in it."""

    def __init__(self, size_bytes: int):
        pages = mmap.mmap(-1, size_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them: reading is slower
                pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE
        self._free = memory[start : start + size_bytes]

    def take(self, size_bytes: int) -> Tensor:
        """The next part of the arena, uint8."""
        taken, self._free = self._free[:size_bytes], self._free[-(-size_bytes // LINE) * LINE :]
        return taken

    def copy(self, x: Tensor) -> Tensor:
        """A copy of ``x`` in the next part of the arena."""
        return self.take(x.nbytes).view(x.dtype).view(x.shape).copy_(x)
