"""Symmetric memory of the GPUs of one machine (NVLink or PCIe), and one-shot all-reduces of small messages over it.

A tensor-parallel decoding step all-reduces a few kilobytes twice per layer, and a step over a sharded cache gathers
similarly small messages; a library's collective takes as long for these as for a megabyte. :class:`SmallAllReduce` runs
them by :mod:`colonnade.parallel.triton_small_allreduce`, one kernel that reads the peers' memory. The size limits are a
table, ``small_allreduce.json`` next to this file, measured by ``python benchmarks/small_reduce.py --tune``; "none" in
``measured_on`` marks limits that were estimated. Larger messages, several machines, CPUs and tensors that need a
gradient use the library's collectives.
"""

import functools
import hashlib
import importlib.util
import json
import socket
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade.parallel.axis import Axes, Axis
from colonnade.parallel.collectives import group_of

MAX_BYTES = 1 << 20
"""The largest message that a slot holds."""
BLOCK = 1024
"""Elements of one thread block."""
BLOCKS = MAX_BYTES // (2 * BLOCK)
"""Thread blocks of the largest message of 16-bit elements."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def allocate_symmetric(axis: Axis, size_bytes: int, device: torch.device) -> tuple[Tensor, Any]:
    """Allocate zeroed memory on each rank of ``axis``; returns this rank's, and torch's handle on all of it.

    All ranks must call it together.
    """
    from torch.distributed import _symmetric_memory as symmetric

    # Older versions of torch need this call; newer ones warn that it is not needed.
    if enable := getattr(symmetric, "enable_symm_mem_for_group", None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            enable(axis.group)
    memory = symmetric.empty(size_bytes, dtype=torch.uint8, device=device)
    memory.zero_()
    handle = symmetric.rendezvous(memory, group_of(axis.group))
    handle.barrier(channel=0)  # no rank writes before all memory is zeroed
    return memory, handle


def peers_reachable(axis: Axis, device: torch.device, *, able: bool = True) -> bool:
    """Whether all ranks are on one machine, with GPUs that access each other's memory, and all are ``able``."""
    host = int.from_bytes(hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest(), "big")
    host_R, gpu_R = axis.all_gather_(torch.tensor([host, device.index or 0])).T
    able = able and bool((host_R == host_R[0]).all())
    if able:
        gpus = gpu_R.tolist()
        able = all(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b)
    return not axis.max_(torch.tensor([int(not able)])).item()


@functools.cache
def size_limits(ranks: int) -> tuple[int, int]:
    """Largest message in bytes per rank, (of a sum, of a gather), for which the kernel is used over ``ranks``."""
    table = json.loads(Path(__file__).with_name("small_allreduce.json").read_text(encoding="utf-8"))
    sums, gathers = (min(MAX_BYTES, table[kind].get(str(ranks), 0)) for kind in ("sum", "gather"))
    return sums, gathers


@dataclass(frozen=True, eq=False)
class SmallAllReduce:
    """The small collectives of one axis; all ranks make the same calls in the same order, on one stream at a time."""

    ranks: int
    rank: int
    slots_R: Tensor
    """int64: the address of every rank's two slots."""
    flags_R: Tensor
    """int64: the address of every rank's flags, int32 (BLOCKS, ranks), initially 0."""
    calls: Tensor
    """int32 (BLOCKS,), equal on all ranks: calls so far."""
    limits: tuple[int, int]
    """See :func:`size_limits`."""
    memory: Any = None
    """Owner of the memory at these addresses."""
    slot_bytes: int = MAX_BYTES
    block: int = BLOCK

    def can_sum(self, x: Tensor) -> bool:
        """Whether :meth:`sum` supports ``x``."""
        fits = 0 < x.nbytes <= self.limits[0] and x.dtype in FLOATS
        return fits and x.device == self.calls.device and not (x.requires_grad and torch.is_grad_enabled())

    def can_gather(self, x: Tensor) -> bool:
        """Whether :meth:`gather` supports ``x``."""
        aligned = x.nbytes % 4 == 0 and x.storage_offset() * x.itemsize % 4 == 0  # it is sent as int32
        return 0 < x.nbytes <= self.limits[1] and aligned and x.device == self.calls.device

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, in float32 and in rank order: bitwise equal on all ranks."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._exchange(out, x, summed=True)
        return out

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the ``x`` of all ranks along dimension 0."""
        x = x.contiguous()
        out = x.new_empty((self.ranks * len(x), *x.shape[1:]))
        self._exchange(out.view(-1).view(torch.int32), x.view(-1).view(torch.int32), summed=False)
        return out

    def _exchange(self, out: Tensor, x: Tensor, *, summed: bool) -> None:
        from colonnade.parallel import triton_small_allreduce  # importing Triton takes a second, and needs a GPU

        addresses = (self.slots_R, self.flags_R)
        triton_small_allreduce.run(out, x, addresses, self.calls, self.slot_bytes, self.rank, self.block, summed=summed)


def with_small_allreduce(axes: Axes, device: torch.device) -> Axes:
    """Return ``axes`` with small collectives on the tensor, context and expert axes, where the machine allows them.

    All ranks must call this together. Training is unaffected: tensors that need a gradient use the library.
    """
    if device.type != "cuda":
        return axes
    made: dict[str, SmallAllReduce | None] = {}
    candidates = (axes.tp, axes.cp, axes.model, axes.experts.all)
    for axis in candidates:
        if axis.size > 1 and axis.group not in made:
            made[axis.group] = make_small_allreduce(axis, device)
    tp, cp, model, experts = (replace(axis, small_collectives=made.get(axis.group)) for axis in candidates)
    return replace(axes, tp=tp, cp=cp, model=model, experts=replace(axes.experts, all=experts))


def make_small_allreduce(
    axis: Axis, device: torch.device, limits: tuple[int, int] | None = None
) -> SmallAllReduce | None:
    """Set up the small collectives of ``axis``; None where its ranks cannot access each other's memory."""
    limits = limits or size_limits(axis.size)
    has_triton = importlib.util.find_spec("triton") is not None
    if not max(limits) or not peers_reachable(axis, device, able=has_triton):
        return None
    memory, handle = allocate_symmetric(axis, 2 * MAX_BYTES + 4 * BLOCKS * axis.size, device)
    addresses = [handle.get_buffer(r, memory.shape, memory.dtype).data_ptr() for r in range(axis.size)]
    address_R = torch.tensor(addresses, dtype=torch.int64, device=device)
    calls = torch.zeros(BLOCKS, dtype=torch.int32, device=device)
    return SmallAllReduce(axis.size, axis.rank, address_R, address_R + 2 * MAX_BYTES, calls, limits, (memory, handle))
