"""Divides this machine's CPU cores among the processes of a model: replicas × ranks × threads.

    usable = min(physical cores this process may use, CPU quota of its control groups)
    each rank gets t threads and t cores of one NUMA node: the largest t with  Σ over nodes ⌊cores / t⌋ ≥ ranks

What decides, in this order:

- Matrix products saturate a physical core with one thread, so hardware threads (SMT) get none, and the affinity leaves
  them out. They are used if there are more ranks than cores.
- Cores of another NUMA node read a replica's weights at half the speed or less.
- OpenMP gives each thread the same share, and the slowest is waited for: efficiency cores are left out.
- A quota limits CPU time, not the set of cores. Other containers have the same cores, so a rank is pinned to a node's
  cores, not to a few of them.

All ranks have equally many threads; cores that they do not divide stay idle, with a warning. Source: "Grokking PyTorch
Intel CPU performance from first principles" (PyTorch tutorials); measured by ``benchmarks/cpu_ladder.py``.

How OpenMP's threads wait must be set before torch is imported (:func:`set_openmp`), so this module does not import it.
"""

import functools
import os
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from colonnade.cgroups import control_groups
from colonnade.config.base import plural
from colonnade.errors import ConfigError
from colonnade.proc_stat import PROC, stat_fields

SYS = Path("/sys/devices/system")

SLOW_SHARE = 0.8
"""A core is an efficiency core if its capacity or top frequency is under this part of the fastest core's."""

MAX_IDLE_LOAD = 0.25
"""Cores count as shared if processes keep more than this part of them busy, in the last minute and at the start."""

SAMPLE_S = 0.1
"""How long the CPUs are watched where the last minute was busy: that may be a server that has just ended."""

SPIN_COUNT = 5000
"""Rounds for which a waiting OpenMP thread that owns its core spins before it sleeps, about 50 µs; libgomp's default is
300,000. SmolLM2 on two idle cores, 8 tokens: 0.20 s, default 0.26 to 0.30 s, without spinning 0.37 s."""

OPENMP_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""A user who has set one of them has decided."""


class Cpu(NamedTuple):
    """A logical CPU: a hardware thread of a core."""

    number: int
    core: int
    """The smallest number among the core's hardware threads."""
    socket: int = 0
    node: int = 0
    """NUMA node."""
    speed: int = 0
    """Capacity or top frequency, in the same unit for all; 0: unknown."""


class Machine(NamedTuple):
    """The cores that this process may use."""

    cpus: tuple[Cpu, ...]
    quota: float | None = None
    """CPU quota of the control groups [cores]."""
    load: float = 0.0
    """Share of the CPUs that processes keep busy."""
    here: int | None = None
    """CPU on which this process runs."""

    @property
    def cores(self) -> int:
        """Physical cores that are worth a thread."""
        return sum(map(len, _pools(self)[0]))

    @property
    def usable(self) -> int:
        """Cores worth a thread, within the quota."""
        return max(1, min(self.cores, int(self.quota or self.cores)))

    @property
    def throttled(self) -> bool:
        """Whether the quota is smaller than the number of cores."""
        return self.quota is not None and self.quota < self.cores

    @property
    def idle(self) -> bool:
        """Whether nothing else is expected to use the cores."""
        return not self.throttled and self.load <= MAX_IDLE_LOAD


class CpuPlacement(NamedTuple):
    """Where one replica runs."""

    ranks: tuple[tuple[int, ...], ...]
    """Logical CPUs of each of its ranks."""
    threads: int
    """Threads of each rank."""
    owned: bool
    """Whether each thread has a core that nothing else is expected to use."""

    @property
    def cpus(self) -> tuple[int, ...]:
        """Logical CPUs of all ranks."""
        return tuple(dict.fromkeys(cpu for rank in self.ranks for cpu in rank))


# -- placement ---------------------------------------------------------------------------------------------------------


def place_replicas(machine: Machine, replicas: int = 1, ranks: int = 1) -> tuple[CpuPlacement, ...]:
    """A placement for each of ``replicas`` with ``ranks`` processes; raises :class:`ConfigError` for too many replicas.

    If there are more ranks than CPUs, those of a replica share its CPUs.
    """
    most = max(1, min(len(machine.cpus), int(machine.quota or len(machine.cpus))))
    if replicas > most:
        has = plural(len(machine.cpus), "core")
        within = "" if machine.quota is None else f" within a CPU quota of {machine.quota:g}"
        raise ConfigError(
            f"{replicas} replicas need one core each, and this process may use {has}{within}; set --serve.replicas to "
            f"at most {most}"
        )
    levels = _pools(machine)
    for level in levels:
        budget = max(1, machine.usable // (replicas * ranks))
        threads = max((t for t in range(1, budget + 1) if _fitting(level, t) >= replicas * ranks), default=0)
        if threads:
            break
    else:
        shared = place_replicas(machine, replicas)
        return tuple(CpuPlacement(each.ranks * ranks, 1, owned=False) for each in shared)
    owned = machine.idle and replicas * ranks * threads <= machine.cores
    blocks = _blocks(level, len(levels[0]), replicas, ranks, threads, exclusive=not machine.throttled)
    return tuple(CpuPlacement(block, threads, owned) for block in blocks)


def auto_replicas(machine: Machine, ranks: int = 1) -> int:
    """The fewest replicas that leave the fewest cores idle, up to one a NUMA node.

    More would divide a batch, and each would read all weights: decoding is bound by the node's memory bandwidth.
    """
    nodes = min(len({cpu.node for cpu in machine.cpus}), machine.usable)
    return max(range(1, nodes + 1), key=lambda n: (cores_used(machine, n, ranks), -n))


def cores_used(machine: Machine, replicas: int, ranks: int = 1) -> int:
    """Cores that ``replicas`` use, at most :attr:`Machine.usable`."""
    return min(machine.usable, replicas * ranks * place_replicas(machine, replicas, ranks)[0].threads)


def idle_warning(machine: Machine, replicas: int, ranks: int = 1) -> str:
    """A warning for the operator if ``replicas`` leave cores idle; otherwise empty."""
    working, usable = cores_used(machine, replicas, ranks), machine.usable
    if working == usable:
        return ""
    most = usable // ranks
    complete = [n for n in range(1, most + 1) if cores_used(machine, n, ranks) == usable]
    nearest = sorted(sorted(complete, key=lambda n: abs(n - replicas))[:2])
    remedy = f"; --serve.replicas {' or '.join(map(str, nearest))} would use all" if nearest else ""
    threads = place_replicas(machine, replicas, ranks)[0].threads
    return (
        f"{plural(replicas, 'replica')} of {plural(ranks, 'rank')} with {plural(threads, 'thread')} use {working} of "
        f"{usable} cores and leave {1 - working / usable:.0%} idle, since each rank stays within a NUMA node and all "
        f"have the same number of threads{remedy}"
    )


Pool = list[int]
"""Logical CPUs of one kind in one NUMA node, in the order in which they are given out."""


def _pools(machine: Machine) -> tuple[list[Pool], ...]:
    """Pools to try in turn: a CPU of each fast core; a CPU of each core; all CPUs. The process's node comes first."""
    fastest = max(cpu.speed for cpu in machine.cpus)
    first = next((cpu.node for cpu in machine.cpus if cpu.number == machine.here), None)
    firsts = {cpu.core: cpu.number for cpu in sorted(machine.cpus, reverse=True)}

    def grouped(cpus: Sequence[Cpu]) -> list[Pool]:
        pools: dict[tuple[bool, bool, int], Pool] = {}
        for cpu in sorted(cpus, key=lambda each: (each.socket, each.core, each.number)):
            pools.setdefault((cpu.speed < SLOW_SHARE * fastest, cpu.node != first, cpu.node), []).append(cpu.number)
        return [pools[key] for key in sorted(pools)]

    cores = [cpu for cpu in machine.cpus if firsts[cpu.core] == cpu.number]
    fast = [cpu for cpu in cores if cpu.speed >= SLOW_SHARE * fastest]
    return grouped(fast), grouped(cores), grouped(machine.cpus)


def _fitting(pools: list[Pool], threads: int) -> int:
    return sum(len(pool) // threads for pool in pools)


def _blocks(
    pools: list[Pool], fast: int, replicas: int, ranks: int, threads: int, *, exclusive: bool
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """CPUs of each rank of each replica; a replica starts in the node with the most free cores.

    The first ``fast`` pools are used before the others. Without ``exclusive`` a rank gets all of its pool.
    """
    left = [list(pool) for pool in pools]
    for _ in range(replicas):
        order = sorted(range(len(pools)), key=lambda i: (i >= fast, -(len(left[i]) // threads)))
        blocks = []
        for i in order:
            while len(blocks) < ranks and len(left[i]) >= threads:
                block, left[i] = left[i][:threads], left[i][threads:]
                blocks.append(tuple(block if exclusive else pools[i]))
        yield tuple(blocks)


# -- the machine -------------------------------------------------------------------------------------------------------


def read_machine(sys: Path = SYS, proc: Path = PROC, allowed: Sequence[int] | None = None) -> Machine:
    """This machine, as far as this process may use it; ``allowed`` are the CPUs of its affinity."""
    if allowed is None:
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    online = _read_list(sys / "cpu" / "online")
    numbers = [cpu for cpu in allowed if not online or cpu in online] or list(allowed)
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in sorted((sys / "node").glob("node[0-9]*"))
        for cpu in _read_list(folder / "cpulist")
    }
    cpus = [_read_cpu(sys / "cpu" / f"cpu{number}", number, nodes.get(number, 0)) for number in numbers]
    if not all(cpu.speed for cpu in cpus):
        cpus = [cpu._replace(speed=0) for cpu in cpus]
    return Machine(tuple(cpus), cpu_quota(proc), _load(numbers, proc), _current_cpu(proc))


def _load(cpus: Sequence[int], proc: Path) -> float:
    """Share of the CPUs that was busy during the last minute, or is busy now if that is less."""
    minute = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0
    return minute if minute <= MAX_IDLE_LOAD else min(minute, _busy_now(tuple(cpus), proc))


@functools.cache
def _busy_now(cpus: tuple[int, ...], proc: Path) -> float:
    """Share of ``cpus`` that is busy when this process asks first, before it uses them itself; 1 if unknown."""
    before = _cpu_ticks(cpus, proc)
    time.sleep(SAMPLE_S)
    busy, total = (b - a for a, b in zip(before, _cpu_ticks(cpus, proc), strict=True))
    return busy / total if total > 0 else 1.0


def _cpu_ticks(cpus: Sequence[int], proc: Path) -> tuple[int, int]:
    """Busy time and all time of ``cpus`` since the machine started; zeros if the kernel does not report them."""
    names, busy, total = {f"cpu{cpu}" for cpu in cpus}, 0, 0
    for name, *words in filter(None, map(str.split, _read_text(proc / "stat").splitlines())):
        if name in names:
            ticks = [int(word) for word in words[:8]]  # what follows, guests' time, is also in the first ones
            total += sum(ticks)
            busy += sum(ticks) - sum(ticks[3:5])  # idle, and waiting for input and output
    return busy, total


def cpu_quota(proc: Path = PROC) -> float | None:
    """The tightest CPU quota of this process's control groups [cores]; None without one."""
    quotas = []
    for version, folder in control_groups("cpu", proc):
        files = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        if all((folder / file).is_file() for file in files):
            words = " ".join(_read_text(folder / file) for file in files).split()
            if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # no limit: max, or -1
                quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _read_cpu(folder: Path, number: int, node: int) -> Cpu:
    """A CPU; if the kernel reports nothing else, it is its own core."""
    topology = folder / "topology"
    siblings = _read_list(topology / "core_cpus_list") or _read_list(topology / "thread_siblings_list") or [number]
    speed = _read_int(folder / "cpu_capacity") or _read_int(folder / "cpufreq" / "cpuinfo_max_freq")
    return Cpu(number, min(siblings), _read_int(topology / "physical_package_id"), node, speed)


def _read_int(file: Path) -> int:
    text = _read_text(file)
    return int(text) if text.isdecimal() else 0


def _read_list(file: Path) -> list[int]:
    """The numbers of a list such as 0-3,8."""
    edges = [part.partition("-") for part in _read_text(file).split(",") if part]
    return [i for first, _, last in edges for i in range(int(first), int(last or first) + 1)]


def _read_text(file: Path) -> str:
    """The content; empty if the kernel does not have the file, or cannot read what it is about (an offline CPU)."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _current_cpu(proc: Path) -> int | None:
    """The CPU on which this process runs; the kernel starts processes where the load is least."""
    return int(stat_fields("self", proc)[36]) if (proc / "self" / "stat").is_file() else None


# -- this process ------------------------------------------------------------------------------------------------------


def set_openmp(environ: MutableMapping[str, str], threads: int, *, owned: bool) -> None:
    """Let OpenMP use at most ``threads`` threads, which wait without holding up others; before torch is imported.

    By default waiting threads spin for milliseconds: on a core that others use too, they hold up the very thread for
    which they wait. With two other busy processes on two cores, 8 tokens of SmolLM2 took 7.9 s instead of 0.3 s, and a
    training step of small layers 1.3 s instead of 0.1 s. ``owned`` threads spin briefly, others sleep immediately.
    """
    given = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if not (given.isdecimal() and 0 < int(given) <= threads):
        environ["OMP_NUM_THREADS"] = str(threads)
    if not any(name in environ for name in OPENMP_VARIABLES):
        environ["OMP_WAIT_POLICY"] = "PASSIVE"
        if owned:
            environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    elif environ.get("GOMP_SPINCOUNT") == str(SPIN_COUNT) and not owned:  # set by the process that started this one
        del environ["GOMP_SPINCOUNT"]


def set_openmp_unpinned(environ: MutableMapping[str, str]) -> None:
    """:func:`set_openmp` for one process that is not pinned, or for each that torchrun started on this machine.

    The number of threads is the user's, if OMP_NUM_THREADS is set.
    """
    machine, local = read_machine(), environ.get("LOCAL_WORLD_SIZE", "")
    ranks = max(1, int(local)) if local.isdecimal() else 1
    threads = max(1, machine.usable // ranks)
    given = environ.get("OMP_NUM_THREADS")
    set_openmp(environ, threads, owned=machine.idle and threads * ranks <= machine.cores)
    environ["OMP_NUM_THREADS"] = given or environ["OMP_NUM_THREADS"]


def threads_per_rank(ranks: int) -> int:
    """Threads for each of ``ranks`` unpinned processes on this machine."""
    return max(1, read_machine().usable // ranks)


@contextmanager
def child_placement(cpus: CpuPlacement | None, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Processes that are started in the block have the affinity, threads and OpenMP settings of ``cpus``.

    They inherit ``environ``, that of this process, and the affinity: what they import first does not matter. Without
    ``cpus`` they may use the whole machine.
    """
    given, pinned = dict(environ), cpus.cpus if cpus and hasattr(os, "sched_setaffinity") else ()
    before = os.sched_getaffinity(0) if pinned else set()
    if cpus:
        set_openmp(environ, cpus.threads, owned=cpus.owned)
    else:
        set_openmp_unpinned(environ)
    try:
        if pinned:
            os.sched_setaffinity(0, pinned)
        yield
    finally:
        if pinned:
            os.sched_setaffinity(0, before)
        for name in ("OMP_NUM_THREADS", *OPENMP_VARIABLES):
            if name in given:
                environ[name] = given[name]
            else:
                environ.pop(name, None)
