"""Error reports for runs that run out of memory: what filled it, and which settings would help.

Memory that lasts from step to step is counted from the run's own tensors, each storage once; the rest of the
allocator's peak in this step is activations and temporaries. The remedies come from
:mod:`~colonnade.train.memory_advice`, with its estimate scaled by how much more the run needed.
"""

import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.config import RunConfig, format_bytes
from colonnade.config.memory_remedies import MemoryUse, memory_table
from colonnade.errors import CapacityError
from colonnade.parallel.device_memory import free_host_bytes, host_bytes
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.launch import local_ranks
from colonnade.train.memory_advice import Machine, advice
from colonnade.train.memory_estimate import estimate
from colonnade.train.optimizer import AdamW

REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
OOM_MESSAGE = re.compile("DefaultCPUAllocator|CUDA error: out of memory")
UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def peak_bytes(device: torch.device) -> int:
    """Peak memory: since :func:`reset_peak` on a GPU, resident since the process started on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak(device: torch.device) -> None:
    """Restart the measurement of :func:`peak_bytes`, on a GPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@dataclass(frozen=True)
class MemoryBreakdown:
    """The memory of one rank when an allocation failed [bytes]."""

    masters: int
    weights: int
    """Weights other than the masters: copies in a lower compute type, or gathered ones."""
    gradients: int
    moments: int
    activations: int
    """And temporaries: the rest of the allocator's peak. On a CPU also the program itself."""
    unused: int
    """Reserved by the allocator in pieces that were too small."""
    others: int
    """The driver, NCCL, other processes."""
    requested: int
    """The failed allocation; 0 when unknown."""
    capacity: int

    @property
    def in_use(self) -> int:
        """The memory that the run used."""
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
            "requested": self.requested,
        }
        return memory_table({what: n for what, n in rows.items() if n}, self.capacity, "capacity")


def memory_breakdown(
    model: nn.Module, masters: Masters, optimizer: AdamW, device: torch.device, error: BaseException
) -> MemoryBreakdown:
    """Measure the memory in use while the frames of ``error`` keep the step's tensors alive."""
    counted: set[int] = set()

    def count(tensors: Iterable[Tensor | None]) -> int:
        return _storage_bytes((x for x in tensors if x is not None), device, counted)

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
    return MemoryBreakdown(
        **known,
        activations=max(in_use - sum(known.values()), 0),
        unused=unused,
        others=others,
        requested=requested_bytes(error),
        capacity=capacity,
    )


def requested_bytes(error: BaseException) -> int:
    """The size of the failed allocation; 0 if ``error`` does not contain it."""
    match = REQUESTED.search(str(error))
    return int(float(match[1]) * UNITS[match[2].lower()]) if match else 0


def find_oom_error(error: BaseException) -> BaseException | None:
    """The out-of-memory error among ``error`` and its causes, if any.

    torch's pipelines wrap what a stage raises, and on a CPU torch has no separate type for it.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError | MemoryError) or OOM_MESSAGE.search(str(cause)):
            return cause
        cause = cause.__cause__
    return None


@contextmanager
def explain_oom(
    run: RunConfig, model: nn.Module, masters: Masters, optimizer: AdamW, device: torch.device, when: str
) -> Iterator[None]:
    """Convert an out-of-memory error inside, ``"in step 2"``, to a :class:`CapacityError` with remedies."""

    def explain(error: BaseException, requested: int) -> str:
        breakdown = memory_breakdown(model, masters, optimizer, device, error)
        used = breakdown.in_use
        return f"It is filled by\n{breakdown}\n" + _advice(run, device, used + requested, used + breakdown.unused)

    reset_peak(device)
    with _explained(device, when, explain):
        yield


@contextmanager
def explain_setup_oom(run: RunConfig, device: torch.device) -> Iterator[None]:
    """Convert an out-of-memory error in the setup of a run to a :class:`CapacityError` with the estimate."""

    def explain(_: BaseException, requested: int) -> str:
        free = peak_bytes(device)
        use = MemoryUse(device.type, _largest_rank_estimate(run, device), free)
        remedies = _advice(run, device, max(use.total, free + requested), free)
        return f"By the memory estimate a rank needs\n{use}\n{remedies}"

    with _explained(device, "before the first step", explain):
        yield


@contextmanager
def _explained(device: torch.device, when: str, explain: Callable[[BaseException, int], str]) -> Iterator[None]:
    """Raise :class:`CapacityError` with the text of ``explain(error, requested bytes)`` for an out-of-memory error."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        oom = find_oom_error(error)
        if oom is None:
            raise
        requested = requested_bytes(oom)
        more = f", which requested {format_bytes(requested)} more" if requested else ""
        raise CapacityError(f"out of memory on {device} {when}{more}. {explain(oom, requested)}") from error


@contextmanager
def explain_checkpoint_copy_oom(name: str) -> Iterator[None]:
    """Convert an out-of-memory error on the host, for the copy of checkpoint ``name``, to a :class:`CapacityError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if find_oom_error(error) is None:
            raise
        raise CapacityError(
            f"not enough host memory for the copy from which {name} is written while training continues; set "
            "--train.no_async_save"
        ) from error


def _advice(run: RunConfig, device: torch.device, needed: int, free: int) -> str:
    """Remedies that fit a rank into ``free`` bytes, with the estimate scaled to the ``needed`` bytes of ``run``."""
    ranks = local_ranks(run.plan)
    scale = max(1.0, needed / sum(_largest_rank_estimate(run, device).values()))
    host = ranks * free if device.type == "cpu" else free_host_bytes()
    return advice(run, Machine(device.type, host, device=free, ranks=ranks, scale=scale))


def _largest_rank_estimate(run: RunConfig, device: torch.device) -> dict[str, int]:
    """The estimate of the rank that needs most on its device."""
    stages = [estimate(run, device.type, rank).device for rank in range(run.plan.pp)]
    return max(stages, key=lambda rows: sum(rows.values()))


def _storage_bytes(tensors: Iterable[Tensor], device: torch.device, counted: set[int]) -> int:
    """Bytes of the storages behind ``tensors`` on ``device`` that are not yet in ``counted``; adds them to it."""
    total = 0
    for x in tensors:
        to_local = getattr(x, "to_local", None)  # FSDP's DTensors
        storage = (x if to_local is None else to_local()).untyped_storage()
        if storage.device.type == device.type and storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total += storage.nbytes()
    return total
