"""What filled the memory when a run ran out of it, and what would help.

The parts that last from step to step are counted from the run's own tensors, no storage twice; the rest of what the
allocator had given out at its highest in this step are activations and temporaries. What would help is
:mod:`~colonnade.train.memory_advice`'s: its estimate, in proportion to how much more the run was seen to need.
"""

import re
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.config import RunConfig, size
from colonnade.errors import CapacityError
from colonnade.parallel.device_memory import free_host_bytes, host_bytes
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.launch import local_ranks
from colonnade.train.memory_advice import Machine, Need, advice
from colonnade.train.memory_estimate import estimate
from colonnade.train.optimizer import AdamW

REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
OOM_MESSAGE = re.compile("DefaultCPUAllocator|CUDA error: out of memory")
UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def peak_bytes(device: torch.device) -> int:
    """The most that was in use: since :func:`reset_peak` on a GPU, since the process began on a CPU (resident)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak(device: torch.device) -> None:
    """From now on counts what :func:`peak_bytes` says."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@dataclass(frozen=True)
class MemoryBreakdown:
    """The memory of one rank at the moment when there was too little."""

    masters: int
    weights: int
    """Weights that are not themselves the masters: copies in a lower compute type, or gathered ones."""
    gradients: int
    moments: int
    activations: int
    """And temporaries: all else that the allocator had given out. On a CPU also the program itself."""
    unused: int
    """Held by the allocator in pieces that did not fit."""
    others: int
    """The driver, NCCL, other processes."""
    wanted: int
    """What was asked for; 0 when it is not known."""
    capacity: int

    @property
    def in_use(self) -> int:
        """What the run held."""
        return self.masters + self.weights + self.gradients + self.moments + self.activations

    def __str__(self) -> str:
        rows = {
            "master weights": self.masters,
            "weights to compute with": self.weights,
            "gradients": self.gradients,
            "moments": self.moments,
            "activations and the rest": self.activations,
            "unused pieces": self.unused,
            "driver and others": self.others,
        }
        lines = [f"  {what:<26}{size(n):>12}  {n / self.capacity:>6.1%}" for what, n in rows.items() if n]
        wanted = f"  {'wanted besides':<26}{size(self.wanted):>12}  {self.wanted / self.capacity:>6.1%}"
        there = f"  {'there is':<26}{size(self.capacity):>12}"
        return "\n".join([*lines, *([wanted] if self.wanted else []), there])


def memory_breakdown(
    model: nn.Module, masters: Masters, optimizer: AdamW, device: torch.device, error: BaseException
) -> MemoryBreakdown:
    """What is in memory now, while the frames of ``error`` still hold what the step had made."""
    counted: set[int] = set()

    def count(tensors: Iterable[Tensor | None]) -> int:
        return _bytes((x for x in tensors if x is not None), device, counted)

    local = masters.local
    in_use = peak_bytes(device)
    known = {
        "masters": count(local.values()),
        "gradients": count([*(w.grad for w in local.values()), *(p.grad for p in model.parameters())]),
        "moments": count(optimizer.state.values()),
        "weights": count(model.parameters()),
    }
    if device.type == "cuda":
        free, capacity = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        unused, others = max(reserved - in_use, 0), max(capacity - free - reserved, 0)
    else:
        capacity, unused, others = host_bytes(), 0, 0
    activations = max(in_use - sum(known.values()), 0)
    return MemoryBreakdown(
        **known, activations=activations, unused=unused, others=others, wanted=requested_bytes(error),
        capacity=capacity,
    )  # fmt: skip


def requested_bytes(error: BaseException) -> int:
    """What was asked for when there was not so much, as far as ``error`` tells."""
    found = REQUESTED.search(str(error))
    return int(float(found[1]) * UNITS[found[2].lower()]) if found else 0


@contextmanager
def explain_oom(
    run: RunConfig, model: nn.Module, masters: Masters, optimizer: AdamW, device: torch.device, when: str
) -> Iterator[None]:
    """Turns running out of memory inside, ``"in step 2"``, into a :class:`CapacityError` with remedies."""
    reset_peak(device)
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        lack = find_oom_error(error)
        if lack is None:
            raise
        account = memory_breakdown(model, masters, optimizer, device, lack)
        wanted = f", which wanted {size(account.wanted)} more" if account.wanted else ""
        said = f"out of memory on {device} {when}{wanted}. It is filled by\n{account}\n"
        needed, free = account.in_use + account.wanted, account.in_use + account.unused
        raise CapacityError(said + _advice(run, device, needed, free)) from error


def find_oom_error(error: BaseException) -> BaseException | None:
    """That of ``error`` and its causes (torch's pipelines wrap what a stage raises) which says that there was too
    little memory; torch has no type of its own for that on a CPU.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError | MemoryError) or OOM_MESSAGE.search(str(cause)):
            return cause
        cause = cause.__cause__
    return None


@contextmanager
def explain_setup_oom(run: RunConfig, device: torch.device) -> Iterator[None]:
    """Turns running out of memory inside, where a run is set up, into a :class:`CapacityError` with the estimate."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        lack = find_oom_error(error)
        if lack is None:
            raise
        wanted, free = requested_bytes(lack), peak_bytes(device)
        more = f", which wanted {size(wanted)} more" if wanted else ""
        need = Need(device.type, _largest_rank_estimate(run, device), free)
        said = f"out of memory on {device} before the first step{more}. By the memory estimate a rank takes\n{need}\n"
        raise CapacityError(said + _advice(run, device, max(need.total, free + wanted), free)) from error


@contextmanager
def explain_checkpoint_copy_oom(name: str) -> Iterator[None]:
    """The same for the copy in host memory from which checkpoint ``name`` is to be written."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if find_oom_error(error) is None:
            raise
        raise CapacityError(
            f"there is no host memory for a copy of what {name} is made of, from which it is written while training "
            "goes on; set --train.no_async_save"
        ) from error


def _advice(run: RunConfig, device: torch.device, needed: int, free: int) -> str:
    """Remedies that fit a rank into ``free`` bytes if it takes as much more than estimated as ``run``, which needed
    ``needed``.
    """
    ranks = local_ranks(run.plan)
    scale = max(1.0, needed / sum(_largest_rank_estimate(run, device).values()))
    host = ranks * free if device.type == "cpu" else free_host_bytes()
    return advice(run, Machine(device.type, host, device=free, ranks=ranks, scale=scale))


def _largest_rank_estimate(run: RunConfig, device: torch.device) -> dict[str, int]:
    """The estimate of the rank that has most on its device."""
    stages = [estimate(run, device.type, rank).device for rank in range(run.plan.pp)]
    return max(stages, key=lambda rows: sum(rows.values()))


def _bytes(tensors: Iterable[Tensor], device: torch.device, counted: set[int]) -> int:
    """Of the storages behind ``tensors`` on ``device`` that are not ``counted`` yet, which they are afterwards."""
    total = 0
    for x in tensors:
        storage = _plain(x).untyped_storage()
        if storage.device.type == device.type and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _plain(x: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP has cut."""
    local = getattr(x, "to_local", None)
    return x if local is None else local()
