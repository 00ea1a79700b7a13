"""Checks whether a training run fits into memory, and proposes changes that make it fit.

The estimate is compared with the free memory before anything is allocated: on a CPU for all ranks of a host together,
on GPUs for each rank and its device, and for the host with what it stores in addition to the GPUs. A remedy is the run
with changed settings; it is proposed only if it fits by the same estimate, with a tenth to spare.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch

from colonnade.config import RunConfig, format_bytes
from colonnade.config.memory_remedies import Changes, MemoryUse, Option, combine, flags, merge, mildest
from colonnade.config.presets import PRESETS, preset
from colonnade.errors import CapacityError, ColonnadeError
from colonnade.parallel.axis import world_axis
from colonnade.parallel.device_memory import USABLE_FRACTION, free_bytes, free_host_bytes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import local_ranks
from colonnade.train.memory_estimate import PROGRAM_BYTES, estimate

REMEDY_SHARE = 0.9
"""The share of free memory that a remedy may use: a margin for the estimate's error."""
MAX_HOSTS = 1024
MIN_SEQUENCE = 64
"""The shortest sample that is proposed [tokens]."""
CHANGES_RESULTS = {"train.dtype", "data.sequence"}
"""Settings that change the results of the run."""


@dataclass(frozen=True)
class Machine:
    """The memory of each host, and how many ranks run there."""

    kind: str
    """Either cpu or cuda."""
    host: int
    """Free memory of the host [bytes]."""
    device: int = 0
    """Free memory of each GPU [bytes]."""
    ranks: int | None = None
    """Ranks of the run on each host; None: all of them."""
    gpus: int = 0
    program: int = 0
    """Memory of each rank's process before it trains [bytes]; 0 for processes that already run."""
    scale: float = 1.0
    """Measured / estimated memory of a run that ran out of it."""


@dataclass(frozen=True)
class Remedy:
    """A changed run that fits on ``machine``."""

    flags: str
    note: str
    run: RunConfig
    machine: Machine


def check_memory(run: RunConfig, device: str) -> None:
    """Raise :class:`CapacityError` for a run that cannot fit, before its processes start.

    For GPUs only the size is checked: reading the free memory would itself allocate some on them.
    """
    starts = run.plan.world > 1 or run.train.restarts > 0
    machine = Machine(device, free_host_bytes(), ranks=local_ranks(run.plan), program=PROGRAM_BYTES if starts else 0)
    if device == "cuda":
        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        machine = replace(machine, device=min(sizes), gpus=len(sizes))
    check(run, machine)


def check_rank_memory(run: RunConfig, context: DistributedContext) -> None:
    """Raise :class:`CapacityError` for a run that cannot fit; all ranks call this before any of them allocates."""
    machine = Machine(context.device.type, free_host_bytes(), ranks=local_ranks(run.plan))
    if context.device.type == "cuda":
        machine = replace(machine, device=free_bytes(context.device), gpus=torch.cuda.device_count())
    world_axis().max_(torch.zeros(()))  # a barrier: an early rank would allocate memory that others count as free
    check(run, machine)


def check(run: RunConfig, machine: Machine) -> None:
    """Raise :class:`CapacityError` with a table and remedies if ``run`` does not fit and train.check_memory is set."""
    if not run.train.check_memory:
        return
    exceeded = [use for use in memory_use(run, machine) if use.total > USABLE_FRACTION * use.free]
    if exceeded:
        use = exceeded[0]
        ranks = machine.ranks or run.plan.world
        subject = "this run takes" if run.plan.world == 1 else "each rank takes"
        if use.where == "host" and ranks > 1:
            subject = f"the {ranks} ranks of a host together take"
        raise CapacityError(
            f"this run does not fit: by the memory estimate {subject} {format_bytes(use.total)} of a {use.where}'s "
            "memory, and "
            f"{format_bytes(use.free)} is free; nothing was allocated\n{use}\n{advice(run, machine)}\n"
            "--train.no_check_memory runs it anyway"
        )


def memory_use(run: RunConfig, machine: Machine) -> list[MemoryUse]:
    """The memory of ``run`` on a GPU, if it uses any, and on the host with the most to store."""
    plan, ranks_per_host = run.plan, machine.ranks or run.plan.world
    stages = [estimate(run, machine.kind, rank) for rank in range(plan.pp)]
    uses: list[MemoryUse] = []
    if machine.kind == "cuda":
        largest = max(stages, key=lambda stage: sum(stage.device.values()))
        scaled = {what: int(machine.scale * n) for what, n in largest.device.items()}
        uses.append(MemoryUse("GPU", scaled, machine.device))
    hosts: list[dict[str, int]] = []
    for first in range(0, plan.world, ranks_per_host):
        rows: Counter[str] = Counter()
        for rank in range(first, min(first + ranks_per_host, plan.world)):
            stage = stages[rank // plan.stage_ranks]
            rows.update(stage.host if machine.kind == "cuda" else stage.device)
        if machine.kind == "cpu":
            rows = Counter({what: int(machine.scale * n) for what, n in rows.items()})
        rows.update({"processes": ranks_per_host * machine.program} if machine.program else {})
        hosts.append(dict(rows))
    return [*uses, MemoryUse("host", max(hosts, key=lambda rows: sum(rows.values())), machine.host)]


def fits(run: RunConfig, machine: Machine) -> bool:
    """Whether ``run`` fits with a tenth to spare."""
    return all(use.total <= REMEDY_SHARE * use.free for use in memory_use(run, machine))


def advice(run: RunConfig, machine: Machine) -> str:
    """The remedies as text, or that there is none."""
    proposals = remedies(run, machine)
    if not proposals:
        return "by the same estimate no change is sufficient: use a smaller model, or larger machines"
    lines = [f"  {remedy.flags}  ({remedy.note}: {_tightest(remedy)})" for remedy in proposals]
    return "\n".join(["by the same estimate each of these would be enough:", *lines])


def _tightest(remedy: Remedy) -> str:
    use = max(memory_use(remedy.run, remedy.machine), key=lambda use: use.total / max(use.free, 1))
    return f"{format_bytes(use.total)} on a {use.where}"


def remedies(run: RunConfig, machine: Machine) -> list[Remedy]:
    """Changes that make ``run`` fit: a setting, or several if none is enough; more ranks; a smaller model.

    Each setting is changed no further than necessary.
    """
    options = _options(run, machine)
    changed = [remedy for option in options for remedy in _remedy(run, machine, option.cost, option.values)]
    changed = changed or _combined(run, machine, options)
    same_results = [] if changed else [option for option in options if not option.strongest.keys() & CHANGES_RESULTS]
    more_ranks = [remedy for axis in ("dp", "tp") for remedy in _more_ranks(run, machine, axis, merge(same_results))]
    return [*changed, *more_ranks, *_smaller_model(run, machine)]


def _changed(run: RunConfig, changes: Changes) -> RunConfig | None:
    """``run`` with ``changes``; None if that is invalid."""
    sections: dict[str, dict[str, object]] = {}
    for name, value in changes.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    try:
        changed = run.replace(
            **{section: getattr(run, section).replace(**fields) for section, fields in sections.items()}
        )
        changed.plan.check(changed.model)
    except ColonnadeError:
        return None
    return changed


def _fits_with(run: RunConfig, machine: Machine, changes: Changes) -> bool:
    changed = _changed(run, changes)
    return changed is not None and fits(changed, machine)


def _remedy(run: RunConfig, machine: Machine, note: str, values: Iterable[Changes]) -> list[Remedy]:
    """The first of ``values`` that is enough, if any."""
    changes = mildest(values, partial(_fits_with, run, machine))
    changed = None if changes is None else _changed(run, changes)
    return [] if changes is None or changed is None else [Remedy(flags(changes), note, changed, machine)]


def _combined(run: RunConfig, machine: Machine, options: list[Option]) -> list[Remedy]:
    """Several settings at once: no more than needed, and the last one changed no further than needed."""
    fits_with = partial(_fits_with, run, machine)
    chosen = combine(options, lambda changes, _: _changed(run, changes) is not None, fits_with)
    if not fits_with(merge(chosen)):
        return []
    *others, last = chosen
    note = "; ".join(option.cost for option in chosen)
    return _remedy(run, machine, note, [merge(others) | value for value in last.values])


def _options(run: RunConfig, machine: Machine) -> list[Option]:
    """The settings that save memory on the same processes."""
    t = run.resolved(machine.kind).train
    options: list[Option] = []
    if t.async_save:
        options.append(Option("training waits while a checkpoint is written", [{"train.async_save": False}]))
    micro_batch = min(t.micro_batch, t.batch // run.plan.data_ranks)
    cost = "same results, more passes" if run.model.moe is None else "more passes; experts are balanced within each"
    options.append(Option(cost, [{"train.micro_batch": n} for n in _halves(micro_batch, 1)]))
    if t.recompute != "full":
        no_budget: Changes = {"train.activation_bytes": 0} if t.activation_bytes else {}
        kinds = ("attention", "full") if t.recompute == "none" else ("full",)
        values = [{"train.recompute": kind, **no_budget} for kind in kinds]
        options.append(Option("up to a third more arithmetic", values))
    if t.offload == "none" and machine.kind == "cuda":
        options.append(Option("moments in host memory", [{"train.offload": "optimizer"}]))
    if t.dtype in ("float32", "float64"):
        lower = "float32" if t.dtype == "float64" else "bfloat16"
        options.append(Option("other rounding", [{"train.dtype": lower}]))
    options.append(Option("shorter samples", [{"data.sequence": n} for n in _halves(run.data.sequence, MIN_SEQUENCE)]))
    return [option for option in options if option.values]


def _halves(n: int, least: int) -> list[int]:
    halves: list[int] = []
    while (n := n // 2) >= least:
        halves.append(n)
    return halves


def _more_ranks(run: RunConfig, machine: Machine, axis: str, extra: Changes) -> list[Remedy]:
    """The fewest ranks of ``axis`` that are enough, together with those of the ``extra`` changes that are needed.

    GPUs of this host come first, then more hosts.
    """
    ranks_per_host, factor = machine.ranks or run.plan.world, 1
    while (factor := 2 * factor) <= MAX_HOSTS:
        hosts = factor * run.plan.world // ranks_per_host
        note, on = f"on {hosts} hosts like this one, by torchrun", replace(machine, ranks=ranks_per_host)
        if factor * run.plan.world <= machine.gpus:
            note, on = f"{factor * run.plan.world} processes, one GPU each", replace(machine, ranks=None)
        plan: Changes = {f"plan.{axis}": factor * getattr(run.plan, axis)}
        if (moe := run.model.moe) is not None:  # experts are divided among the same ranks
            ep = min(moe.stored_experts, factor * run.plan.ep)
            plan |= {"plan.ep": ep} | ({"plan.etp": factor * run.plan.ep // ep} if factor * run.plan.ep > ep else {})
        if _fits_with(run, on, plan):
            extra = {}
        elif not _fits_with(run, on, plan | extra):
            continue
        for name in list(extra):
            fewer = {key: value for key, value in extra.items() if key != name}
            extra = fewer if _fits_with(run, on, plan | fewer) else extra
        return _remedy(run, on, note, [plan | extra])
    return []


def _smaller_model(run: RunConfig, machine: Machine) -> list[Remedy]:
    """The largest preset of the same kind that fits."""
    if run.train.pretrained_checkpoint:
        return []
    models = {name: preset(name).replace(vocab_size=run.model.vocab_size) for name in PRESETS}
    for name, model in sorted(models.items(), key=lambda item: -item[1].parameters):
        same_kind = model.causal == run.model.causal and (model.moe is None) == (run.model.moe is None)
        if not same_kind or model.parameters >= run.model.parameters or model.context < run.data.sequence:
            continue
        changed = _changed(run.replace(model=model), {})
        if changed is not None and fits(changed, machine):
            return [Remedy(f"--preset {name}", model.size, changed, machine)]
    return []
