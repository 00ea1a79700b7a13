"""Whether a run fits into the memory of its machines, and which changes would make it fit.

A run is compared with what is free before anything is allocated: on a CPU all ranks of a host together, on GPUs each
rank with its device, and with the host what it keeps there. A remedy is the run with something changed, and is offered
only if the same estimate says that it fits, with a tenth to spare.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from colonnade.config import RunConfig, size
from colonnade.config.presets import PRESETS, preset
from colonnade.errors import CapacityError, ColonnadeError
from colonnade.parallel.axis import world_axis
from colonnade.parallel.device_memory import USABLE_FRACTION, free_bytes, free_host_bytes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import local_ranks
from colonnade.train.memory_estimate import PROGRAM_BYTES, estimate

SPARE = 0.9
"""Of what is free, what a remedy may take: the estimate's tolerance."""
MOST_HOSTS = 1024
SHORTEST = 64
"""Tokens of a sample: shorter ones are not offered."""

Changes = dict[str, object]
"""Settings by dotted names: ``{"train.micro_batch": 4}``."""
Settings = list[tuple[str, list[Changes]]]
"""(what it costs, changes from the mildest on), for each of several."""
OTHER_NUMBERS = {"train.dtype", "data.sequence"}
"""Settings that make another run."""


@dataclass(frozen=True)
class Machine:
    """What each host offers a run."""

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
    """What each rank's process takes before it trains [bytes]; 0 where it runs already."""
    scale: float = 1.0
    """How much more a run was seen to take than was estimated."""


@dataclass(frozen=True)
class Remedy:
    """A changed run."""

    flags: str
    note: str
    run: RunConfig
    machine: Machine


@dataclass(frozen=True)
class Need:
    """What a run takes of one memory, and what is free there [bytes]."""

    where: str
    rows: dict[str, int]
    free: int

    @property
    def total(self) -> int:
        """All rows."""
        return sum(self.rows.values())

    def __str__(self) -> str:
        """A row for each part, with its share of what is free."""
        rows = self.rows | {"in all": self.total}
        lines = [f"  {what:<26}{size(n):>12}  {n / max(self.free, 1):>6.1%}" for what, n in rows.items()]
        return "\n".join([*lines, f"  {'free':<26}{size(self.free):>12}"])


def check_memory(run: RunConfig, device: str) -> None:
    """Raise :class:`CapacityError` for a run that cannot fit, before its processes start.

    Of GPUs only the size is looked at: to ask how much is free would take memory on them.
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
    world_axis().max_(torch.zeros(()))  # a rank that went ahead would take what the others count as free
    check(run, machine)


def check(run: RunConfig, machine: Machine) -> None:
    """Raise :class:`CapacityError` with a table and remedies, unless ``run`` fits or is not to be checked."""
    if not run.train.check_memory:
        return
    short = [need for need in needs(run, machine) if need.total > USABLE_FRACTION * need.free]
    if short:
        need = short[0]
        ranks = machine.ranks or run.plan.world
        whose = "this run takes" if run.plan.world == 1 else "each rank takes"
        if need.where == "host" and ranks > 1:
            whose = f"the {ranks} ranks of a host together take"
        raise CapacityError(
            f"this run does not fit: by the memory estimate {whose} {size(need.total)} of a {need.where}'s memory, and "
            f"{size(need.free)} is free; nothing was allocated\n{need}\n{advice(run, machine)}\n"
            "--train.no_check_memory tries it anyway"
        )


def needs(run: RunConfig, machine: Machine) -> list[Need]:
    """What ``run`` takes of a host (that with most to hold), and of a GPU where it runs on some."""
    plan, here = run.plan, machine.ranks or run.plan.world
    stages = [estimate(run, machine.kind, rank) for rank in range(plan.pp)]
    found: list[Need] = []
    if machine.kind == "cuda":
        most = max(stages, key=lambda stage: sum(stage.device.values()))
        found.append(Need("GPU", {what: int(machine.scale * n) for what, n in most.device.items()}, machine.device))
    hosts: list[dict[str, int]] = []
    for first in range(0, plan.world, here):
        rows: Counter[str] = Counter()
        for rank in range(first, min(first + here, plan.world)):
            stage = stages[rank // plan.stage]
            rows.update(stage.host if machine.kind == "cuda" else stage.device)
        if machine.kind == "cpu":
            rows = Counter({what: int(machine.scale * n) for what, n in rows.items()})
        rows.update({"processes": here * machine.program} if machine.program else {})
        hosts.append(dict(rows))
    return [*found, Need("host", max(hosts, key=lambda rows: sum(rows.values())), machine.host)]


def fits(run: RunConfig, machine: Machine) -> bool:
    """Whether ``run`` fits with a tenth to spare."""
    return all(need.total <= SPARE * need.free for need in needs(run, machine))


def advice(run: RunConfig, machine: Machine) -> str:
    """The remedies for people, or that there is none."""
    found = remedies(run, machine)
    if not found:
        return "no remedy was found that is enough by the same estimate: use a smaller model, or larger machines"
    lines = [f"  {it.flags}  ({it.note}: {_taken(it)})" for it in found]
    return "\n".join(["each of these would be enough by the same estimate:", *lines])


def _taken(remedy: Remedy) -> str:
    tightest = max(needs(remedy.run, remedy.machine), key=lambda need: need.total / max(need.free, 1))
    return f"{size(tightest.total)} on a {tightest.where}"


def remedies(run: RunConfig, machine: Machine) -> list[Remedy]:
    """Changes after which ``run`` fits: a setting, or several where none is enough; more ranks; a smaller model.

    Of each setting the least change that is enough.
    """
    settings = _settings(run, machine)
    here = [found for note, ways in settings if (found := _first(run, machine, note, ways)) is not None]
    if not here:
        here = _together(run, machine, settings)
    same = [] if here else [(note, ways) for note, ways in settings if not ways[-1].keys() & OTHER_NUMBERS]
    more = [remedy for axis in ("dp", "tp") for remedy in _more_ranks(run, machine, axis, same)]
    return [*here, *more, *_smaller_model(run, machine)]


def _changed(run: RunConfig, changes: Changes) -> RunConfig | None:
    """``run`` with some settings changed, by dotted names; None where it cannot be."""
    sections: dict[str, dict[str, object]] = {}
    for name, value in changes.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    try:
        made = run.but(**{section: getattr(run, section).but(**fields) for section, fields in sections.items()})
        made.plan.check(made.model)
    except ColonnadeError:
        return None
    return made


def _first(run: RunConfig, machine: Machine, note: str, ways: Iterable[Changes]) -> Remedy | None:
    """The first of ``ways`` that is enough."""
    for changes in ways:
        made = _changed(run, changes)
        if made is not None and fits(made, machine):
            return Remedy(" ".join(_flag(*change) for change in changes.items()), note, made, machine)
    return None


def _flag(name: str, value: object) -> str:
    """``--train.micro_batch 4``, ``--train.no_async_save``."""
    if isinstance(value, bool):
        section, _, field = name.partition(".")
        return f"--{name}" if value else f"--{section}.no_{field}"
    return f"--{name} {value}"


def _settings(run: RunConfig, machine: Machine) -> Settings:
    """(what it costs, changes from the mildest on) for each setting that saves memory on the same processes."""
    t = run.resolved(machine.kind).train
    found: Settings = []
    if t.async_save:
        found.append(("training waits while a checkpoint is written", [{"train.async_save": False}]))
    micro = min(t.micro_batch, t.batch // run.plan.data_ranks)
    cost = "the same numbers, more passes" if run.model.moe is None else "more passes; experts are balanced within each"
    found.append((cost, [{"train.micro_batch": m} for m in _halves(micro, 1)]))
    if t.recompute != "full":
        budget: Changes = {"train.activation_bytes": 0} if t.activation_bytes else {}
        kinds = ("attention", "full") if t.recompute == "none" else ("full",)
        found.append(("up to a third more arithmetic", [{"train.recompute": kind, **budget} for kind in kinds]))
    if t.offload == "none" and machine.kind == "cuda":
        found.append(("moments in host memory", [{"train.offload": "optimizer"}]))
    if t.dtype in ("float32", "float64"):
        lower = "float32" if t.dtype == "float64" else "bfloat16"
        found.append(("other rounding", [{"train.dtype": lower}]))
    found.append(("shorter samples", [{"data.sequence": n} for n in _halves(run.data.sequence, SHORTEST)]))
    return [(note, ways) for note, ways in found if ways]


def _halves(n: int, least: int) -> list[int]:
    found: list[int] = []
    while (n := n // 2) >= least:
        found.append(n)
    return found


def _together(run: RunConfig, machine: Machine, settings: Settings) -> list[Remedy]:
    """Several settings at once: no more of them than are needed, and the last no further changed than is needed."""

    def enough(chosen: Settings) -> bool:
        made = _changed(run, _merged(ways[-1] for _, ways in chosen))
        return made is not None and fits(made, machine)

    chosen: Settings = []
    for setting in settings:
        if _changed(run, _merged(ways[-1] for _, ways in [*chosen, setting])) is not None:
            chosen.append(setting)
        if enough(chosen):
            break
    else:
        return []
    for setting in chosen[:-1]:
        if enough(fewer := [one for one in chosen if one is not setting]):
            chosen = fewer
    others, note = _merged(ways[-1] for _, ways in chosen[:-1]), "; ".join(note for note, _ in chosen)
    found = _first(run, machine, note, [others | way for way in chosen[-1][1]])
    return [] if found is None else [found]


def _merged(changes: Iterable[Changes]) -> Changes:
    return {name: value for one in changes for name, value in one.items()}


def _more_ranks(run: RunConfig, machine: Machine, axis: str, settings: Settings) -> list[Remedy]:
    """The fewest ranks of ``axis`` that are enough, if need be with ``settings`` that keep the numbers: on GPUs of this
    host while it has some, then on more hosts.
    """
    here, times = machine.ranks or run.plan.world, 1
    strong = _merged(ways[-1] for _, ways in settings)
    while (times := 2 * times) <= MOST_HOSTS:
        note, at = f"on {times * run.plan.world // here} hosts like this one, by torchrun", replace(machine, ranks=here)
        if times * run.plan.world <= machine.gpus:
            note, at = f"{times * run.plan.world} processes, a GPU each", replace(machine, ranks=None)
        plan: Changes = {f"plan.{axis}": times * getattr(run.plan, axis)}
        if (moe := run.model.moe) is not None:  # experts are shared out among the same ranks
            ep = min(moe.experts, times * run.plan.ep)
            plan |= {"plan.ep": ep} | ({"plan.sh": times * run.plan.ep // ep} if times * run.plan.ep > ep else {})
        if _first(run, at, note, [plan]) is not None:
            strong = {}
        elif _first(run, at, note, [plan | strong]) is None:
            continue
        for name in list(strong):
            fewer = {key: value for key, value in strong.items() if key != name}
            strong = fewer if _first(run, at, note, [plan | fewer]) is not None else strong
        found = _first(run, at, note, [plan | strong])
        return [] if found is None else [found]
    return []


def _smaller_model(run: RunConfig, machine: Machine) -> list[Remedy]:
    """The largest preset of the same kind that fits."""
    if run.train.start:
        return []
    models = {name: preset(name).but(vocab_size=run.model.vocab_size) for name in PRESETS}
    for name, model in sorted(models.items(), key=lambda it: -it[1].parameters):
        alike = model.causal == run.model.causal and (model.moe is None) == (run.model.moe is None)
        if not alike or model.parameters >= run.model.parameters or model.context < run.data.sequence:
            continue
        made = _changed(run.but(model=model), {})
        if made is not None and fits(made, machine):
            return [Remedy(f"--preset {name}", model.size, made, machine)]
    return []
