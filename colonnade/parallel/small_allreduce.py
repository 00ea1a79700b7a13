"""Small messages between GPUs of one machine: sums and gathers by a kernel that reads the peers' memory.

A tensor-parallel decoding step sums a few kilobytes twice a layer, and a step over a split cache gathers as few: that
takes a library as long as a megabyte. The memory is :mod:`colonnade.parallel.symmetric_memory`', the kernel
:mod:`colonnade.parallel.triton_small_allreduce`. Which messages are small is a table, ``small.json`` beside this file,
that ``python benchmarks/small_reduce.py --tune`` measures; "none" in ``measured_on`` marks limits that were reckoned.
Larger messages, other machines, CPUs and whatever needs a gradient take the library's collectives.
"""

import functools
import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade.parallel.axis import Axes, Axis
from colonnade.parallel.symmetric_memory import reachable, shared

MOST_BYTES = 1 << 20
"""Of the largest message that there is room for."""
BLOCK = 1024
"""Numbers of one block of threads."""
BLOCKS = MOST_BYTES // (2 * BLOCK)
"""As many blocks as a message of 16-bit numbers has at most."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def limits(ranks: int) -> tuple[int, int]:
    """Bytes of one rank's message up to which (a sum, a gather) over so many ranks is small."""
    table = json.loads(Path(__file__).with_name("small.json").read_text(encoding="utf-8"))
    sums, gathers = (min(MOST_BYTES, table[what].get(str(ranks), 0)) for what in ("sum", "gather"))
    return sums, gathers


@dataclass(frozen=True, eq=False)
class SmallAllReduce:
    """One axis' way for small messages. Every rank calls the same in the same order, on one stream at a time."""

    ranks: int
    rank: int
    slots_R: Tensor
    """int64: the address of every rank's two slots."""
    flags_R: Tensor
    """int64: the address of every rank's flags, int32 (BLOCKS, ranks), 0 at first."""
    calls: Tensor
    """int32 (BLOCKS,), equal on all ranks: calls so far."""
    most: tuple[int, int]
    """See :func:`limits`."""
    memory: Any = None
    """What the addresses are of."""
    slot_bytes: int = MOST_BYTES
    block: int = BLOCK

    def sums(self, x: Tensor) -> bool:
        """Whether :meth:`sum` is for ``x``."""
        fits = 0 < x.nbytes <= self.most[0] and x.dtype in FLOATS
        return fits and x.device == self.calls.device and not (x.requires_grad and torch.is_grad_enabled())

    def gathers(self, x: Tensor) -> bool:
        """Whether :meth:`gather` is for ``x``."""
        whole = x.nbytes % 4 == 0 and x.storage_offset() * x.itemsize % 4 == 0  # they travel as 32-bit numbers
        return 0 < x.nbytes <= self.most[1] and whole and x.device == self.calls.device

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, added in float32 in their order: the same bits on each."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._exchange(out, x, summed=True)
        return out

    def gather(self, x: Tensor) -> Tensor:
        """The ``x`` of all ranks, one after another along dimension 0."""
        x = x.contiguous()
        out = x.new_empty((self.ranks * len(x), *x.shape[1:]))
        self._exchange(out.view(-1).view(torch.int32), x.view(-1).view(torch.int32), summed=False)
        return out

    def _exchange(self, out: Tensor, x: Tensor, *, summed: bool) -> None:
        from colonnade.parallel import triton_small_allreduce  # a second to import, for GPUs alone

        addresses = (self.slots_R, self.flags_R)
        triton_small_allreduce.run(out, x, addresses, self.calls, self.slot_bytes, self.rank, self.block, summed=summed)


def with_small(axes: Axes, device: torch.device) -> Axes:
    """``axes`` whose tensor and context ranks have a way for small messages, where the machine has one for them.

    All ranks must call this together. Of a model that trains nothing changes: what needs a gradient goes as before.
    """
    if device.type != "cuda":
        return axes
    made: dict[str, SmallAllReduce | None] = {}
    several = (axes.tp, axes.cp, axes.model, axes.grid.all)
    for axis in several:
        if axis.size > 1 and axis.group not in made:
            made[axis.group] = small_of(axis, device)
    tp, cp, model, experts = (replace(axis, small=made.get(axis.group)) for axis in several)
    return replace(axes, tp=tp, cp=cp, model=model, grid=replace(axes.grid, all=experts))


def small_of(axis: Axis, device: torch.device, most: tuple[int, int] | None = None) -> SmallAllReduce | None:
    """The way for small messages of ``axis``; None where its ranks do not reach each other's memory."""
    most = most or limits(axis.size)
    if not max(most) or not reachable(axis, device, able=importlib.util.find_spec("triton") is not None):
        return None
    memory, handle = shared(axis, 2 * MOST_BYTES + 4 * BLOCKS * axis.size, device)
    addresses = [handle.get_buffer(r, memory.shape, memory.dtype).data_ptr() for r in range(axis.size)]
    address_R = torch.tensor(addresses, dtype=torch.int64, device=device)
    calls = torch.zeros(BLOCKS, dtype=torch.int32, device=device)
    return SmallAllReduce(axis.size, axis.rank, address_R, address_R + 2 * MOST_BYTES, calls, most, (memory, handle))
