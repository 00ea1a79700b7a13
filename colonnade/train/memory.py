"""What filled the memory when a step ran out of it, and what would help.

The parts that last from step to step are counted from the run's own tensors, no storage twice; the rest of what the
allocator had given out at its highest in this step are activations and temporaries. What each change would save is
predicted from these counts:

    micro-batch m → m′     activations · (1 − m′/m)                       they grow with the tokens of a micro-batch
    recompute full         activations · (1 − 1/L) − L · t · D · bytes    a block's input stays, one block is whole
    offload                moments − three staging buckets                (offload.py)
    twice the data ranks   half of masters, gradients, moments            (FSDP; ZeRO-3, arXiv 1910.02054, section 5)
    context ranks          the same, and half of the activations
    tp t → t′              their share that is cut over tp · (1 − t/t′); of activations 1 − f(t′)/f(t), where a block
                           keeps f(t) = 10 + 24/t bytes for each token and unit of width, or 34/t with sequence
                           parallelism (Korthikanti 2022, arXiv 2205.05198, equations 2 and 4, without scores)
"""

import os
import re
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.config import RunConfig, size
from colonnade.errors import CapacityError, ColonnadeError
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.layout import layout_of
from colonnade.train.offload import BUCKET_BYTES
from colonnade.train.optimizer import AdamW

WANTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
LACK = re.compile("DefaultCPUAllocator|CUDA error: out of memory")
UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def peak_bytes(device: torch.device) -> int:
    """The most that was in use: since :func:`begin` on a GPU, since the process began on a CPU (resident)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def begin(device: torch.device) -> None:
    """From now on counts what :func:`peak_bytes` says."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@dataclass(frozen=True)
class Account:
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
    sharded_masters: int
    """Those of :attr:`masters` that tensor parallelism cuts."""

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


@dataclass(frozen=True)
class Change:
    """A remedy."""

    flags: str
    saves: int
    """Predicted bytes of a rank."""
    ranks: int
    """Processes that it takes."""
    note: str = ""


def take_account(
    model: nn.Module, masters: Masters, optimizer: AdamW, device: torch.device, error: BaseException
) -> Account:
    """What is in memory now, while the frames of ``error`` still hold what the step had made."""
    counted: set[int] = set()

    def count(tensors: Iterable[Tensor | None]) -> int:
        return _bytes((x for x in tensors if x is not None), device, counted)

    local, layout = masters.local, layout_of(model)
    in_use = peak_bytes(device)
    cut = _bytes((w for name, w in local.items() if isinstance(layout.get(name), int)), device, set())
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
    return Account(
        **known, activations=activations, unused=unused, others=others, wanted=wanted_bytes(error),
        capacity=capacity, sharded_masters=cut,
    )  # fmt: skip


def wanted_bytes(error: BaseException) -> int:
    """What was asked for when there was not so much, as far as ``error`` tells."""
    found = WANTED.search(str(error))
    return int(float(found[1]) * UNITS[found[2].lower()]) if found else 0


def changes(run: RunConfig, account: Account, device: torch.device) -> list[Change]:
    """What would help, the best first, that the run's configuration allows: first without more processes."""
    t, plan, model = run.train, run.plan, run.model
    held = account.activations + account.wanted
    state = 2 * account.masters + account.moments  # a gradient is as large as its master
    kept = 2 if t.dtype in ("bfloat16", "float16") else 8 if t.dtype == "float64" else 4
    blocks = model.layers // plan.pp
    found: list[Change] = []

    def offer(flags: str, saves: float, note: str = "", **but: RunConfig | object) -> None:
        try:
            other = run.but(**but)
            other.plan.check(other.model)
        except ColonnadeError:
            return
        if saves > 0:
            found.append(Change(flags, int(saves), other.plan.world, note))

    def with_plan(saves: float, **but: object) -> None:
        flags = " ".join(f"--plan.{key} {value}" for key, value in but.items())
        offer(flags.replace(" True", ""), saves, plan=plan.but(**but))

    micro = min(t.micro_batch, t.batch // plan.data_ranks)
    if micro > 1:
        less = micro // 2
        note = "the same numbers, more passes" if model.moe is None else "more passes; experts are balanced within each"
        offer(f"--train.micro_batch {less}", held * (1 - less / micro), note, train=t.but(micro_batch=less))
    if t.recompute != "full" and blocks > 1:
        tokens = micro * run.data.sequence // plan.cp // (plan.tp if plan.sequence_parallel else 1)
        saves = held * (1 - 1 / blocks) - blocks * tokens * model.width * kept
        offer("--train.recompute full", saves, "a third more arithmetic",
              train=t.but(recompute="full", activation_bytes=0))  # fmt: skip
    if t.offload == "none" and device.type == "cuda":
        saves = account.moments - min(account.moments, 3 * BUCKET_BYTES)
        offer("--train.offload optimizer", saves, "moments in host memory", train=t.but(offload="optimizer"))
    if t.dtype == "float32" and device.type == "cuda":
        offer("--train.dtype bfloat16", held / 2 - account.masters / 2, "other rounding",
              train=t.but(dtype="bfloat16"))  # fmt: skip
    if account.unused:
        offer("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", account.unused, "in the environment, at most")
    if plan.tp > 1 and not plan.sequence_parallel:
        with_plan(held * (1 - _kept(plan.tp, True) / _kept(plan.tp, False)), sequence_parallel=True)
    with_plan(state / 2, dp=2 * plan.dp)
    with_plan(state / 2 + held / 2, cp=2 * plan.cp)
    cut = account.sharded_masters * state / max(account.masters, 1)
    on = plan.sequence_parallel
    with_plan(cut / 2 + held * (1 - _kept(2 * plan.tp, on) / _kept(plan.tp, on)), tp=2 * plan.tp)
    return sorted(found, key=lambda change: (change.ranks > plan.world, -change.saves))


def best(found: list[Change], ranks: int, number: int = 3) -> list[Change]:
    """Of ``number`` changes the last is one that takes more processes than ``ranks``, where there are both kinds."""
    here, more = ([c for c in found if (c.ranks > ranks) == larger] for larger in (False, True))
    chosen = here[: number - 1] if more else here[:number]
    return chosen + more[: number - len(chosen)]


@contextmanager
def accounted(
    run: RunConfig, model: nn.Module, masters: Masters, optimizer: AdamW, device: torch.device, when: str
) -> Iterator[None]:
    """Turns running out of memory inside, ``"in step 2"``, into a :class:`CapacityError` with three changes."""
    begin(device)
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        lack = lack_of_memory(error)
        if lack is None:
            raise
        account = take_account(model, masters, optimizer, device, lack)
        wanted = f", which wanted {size(account.wanted)} more" if account.wanted else ""
        raise CapacityError(told(f"{when}{wanted}. It is filled by", account, run, device)) from error


def lack_of_memory(error: BaseException) -> BaseException | None:
    """That of ``error`` and its causes (torch's pipelines wrap what a stage raises) which says that there was too
    little memory; torch has no type of its own for that on a CPU.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError | MemoryError) or LACK.search(str(cause)):
            return cause
        cause = cause.__cause__
    return None


def told(when: str, account: Account, run: RunConfig, device: torch.device) -> str:
    """The account and three changes, for people; ``when`` it was, and what the account is of, are in the first line."""
    lines = [f"out of memory on {device} {when}", str(account)]
    advice = best(changes(run, account, device), run.plan.world)
    if advice:
        lines.append("what would help, and about how much it would save:")
    for change in advice:
        more = f"{change.ranks} processes instead of {run.plan.world}" if change.ranks > run.plan.world else ""
        notes = ", ".join(note for note in (change.note, more) if note)
        lines.append(f"  {change.flags:<26}{size(change.saves):>12}" + (f"  ({notes})" if notes else ""))
    return "\n".join(lines)


def _kept(tp: int, sequence_parallel: bool) -> float:
    """Bytes that a block keeps in 16 bits, for each token and unit of width."""
    return 34 / tp if sequence_parallel else 10 + 24 / tp


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


def host_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
