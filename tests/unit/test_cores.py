"""Cores are divided among replicas on 20 machines, and OpenMP's threads wait as the machine allows."""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from colonnade import cores
from colonnade.cores import Cpu, Machine, auto_replicas, idle_warning, place_replicas, read_machine, set_openmp
from colonnade.errors import ConfigError


class Tree(NamedTuple):
    """The files of /sys/devices/system and /proc of one machine."""

    sys: Path
    proc: Path

    def write(self, path: str, text: object) -> None:
        """Write a file below /sys/devices/system."""
        file = self.sys / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def add_cpus(self, cores_: Iterable[Sequence[int]], node: int = 0, socket: int | None = None, speed: int = 0):
        """Cores with the numbers of their hardware threads."""
        numbers = []
        for siblings in cores_:
            for cpu in siblings:
                self.write(f"cpu/cpu{cpu}/topology/thread_siblings_list", ",".join(map(str, siblings)))
                self.write(f"cpu/cpu{cpu}/topology/physical_package_id", node if socket is None else socket)
                if speed:
                    self.write(f"cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq", speed)
            numbers += siblings
        file = self.sys / f"node/node{node}/cpulist"
        before = file.read_text().strip() + "," if file.exists() else ""
        self.write(f"node/node{node}/cpulist", before + ",".join(map(str, numbers)))

    def set_quota(self, *quotas: str, version: int = 2) -> None:
        """Nested control groups, outermost first, with the content of cpu.max, or quota and period of version 1."""
        mount = self.proc / "cgroup"
        path = "/".join(f"g{i}" for i in range(1, len(quotas)))
        (self.proc / "self").mkdir(parents=True, exist_ok=True)
        kind, name = ("cgroup2", "") if version == 2 else ("cgroup", "cpu,cpuacct")
        (self.proc / "self/cgroup").write_text(f"{0 if version == 2 else 4}:{name}:/{path}\n")
        options = "rw" if version == 2 else f"rw,{name}"
        (self.proc / "self/mountinfo").write_text(f"30 25 0:26 / {mount} rw - {kind} cgroup {options}\n")
        for i, quota in enumerate(quotas):
            folder = mount.joinpath(*(f"g{j}" for j in range(1, i + 1)))
            folder.mkdir(parents=True, exist_ok=True)
            if version == 2:
                (folder / "cpu.max").write_text(quota + "\n")
            else:
                for file, text in zip(("cpu.cfs_quota_us", "cpu.cfs_period_us"), quota.split(), strict=True):
                    (folder / file).write_text(text + "\n")

    def run_on(self, cpu: int) -> None:
        """Let the process run on ``cpu`` when the machine is read."""
        (self.proc / "self").mkdir(parents=True, exist_ok=True)
        (self.proc / "self/stat").write_text(f"7 (a (b) c) R {' '.join(['0'] * 35)} {cpu} 0 0\n")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    return Tree(tmp_path / "sys", tmp_path / "proc")


def smt(count: int, first: int = 0, offset: int | None = None) -> list[tuple[int, int]]:
    """``count`` cores with two hardware threads each, numbered as Linux does: first threads first."""
    return [(i, i + (count if offset is None else offset)) for i in range(first, first + count)]


def single(numbers: Iterable[int]) -> list[tuple[int]]:
    """Cores with one hardware thread."""
    return [(i,) for i in numbers]


def two_sockets(tree: Tree) -> None:
    """2 × 12 cores with 2 threads: the machine of the published ladder."""
    tree.add_cpus(smt(12, 0, 24), node=0)
    tree.add_cpus(smt(12, 12, 24), node=1)


def r(*edges: int) -> tuple[int, ...]:
    return tuple(range(*edges))


MACHINES = {
    "laptop: 4 cores with SMT": (
        lambda t: t.add_cpus(smt(4)), r(8), 1, 1, [[r(4)]], 4, ""
    ),
    "laptop: 6 performance cores with SMT, 8 efficiency cores": (
        lambda t: (t.add_cpus([(2 * i, 2 * i + 1) for i in range(6)], speed=4_700_000),
                   t.add_cpus(single(range(12, 20)), speed=3_500_000)),
        r(20), 1, 1, [[(0, 2, 4, 6, 8, 10)]], 6, "",
    ),
    "the same, 8 replicas: efficiency cores too": (
        lambda t: (t.add_cpus([(2 * i, 2 * i + 1) for i in range(6)], speed=4_700_000),
                   t.add_cpus(single(range(12, 20)), speed=3_500_000)),
        r(20), 8, 1, [[(0,)], [(2,)], [(4,)], [(6,)], [(8,)], [(10,)], [(12,)], [(13,)]], 1, "",
    ),
    "preferred cores that are a little faster count as equal": (
        lambda t: (t.add_cpus(single(range(2)), speed=5_100_000), t.add_cpus(single(range(2, 4)), speed=4_900_000)),
        r(4), 1, 1, [[r(4)]], 4, "",
    ),
    "2 sockets, 1 replica stays in one": (
        two_sockets, r(48), 1, 1, [[r(12)]], 12,
        "1 replica of 1 rank with 12 threads use 12 of 24 cores and leave 50% idle",
    ),
    "2 sockets, 2 replicas": (two_sockets, r(48), 2, 1, [[r(12)], [r(12, 24)]], 12, ""),
    "2 sockets, 3 replicas": (
        two_sockets, r(48), 3, 1, [[r(6)], [r(12, 18)], [r(6, 12)]], 6, "use 18 of 24 cores and leave 25% idle",
    ),
    "2 sockets, 2 ranks of one replica: one in each": (
        two_sockets, r(48), 1, 2, [[r(12), r(12, 24)]], 12, ""
    ),
    "2 sockets, 2 replicas of 2 ranks: a socket for each replica": (
        two_sockets, r(48), 2, 2, [[r(6), r(6, 12)], [r(12, 18), r(18, 24)]], 6, ""
    ),
    "2 sockets, the process runs on the second": (
        lambda t: (two_sockets(t), t.run_on(13)), r(48), 1, 1, [[r(12, 24)]], 12, "leave 50% idle"
    ),
    "2 sockets, NUMA off: one node, blocks within a socket": (
        lambda t: (t.add_cpus(single(range(0, 8, 2)), node=0, socket=0),
                   t.add_cpus(single(range(1, 8, 2)), node=0, socket=1)),
        r(8), 2, 1, [[(0, 2, 4, 6)], [(1, 3, 5, 7)]], 4, "",
    ),
    "cgroup v1, quota of 8 of 24 cores, 4 replicas": (
        lambda t: (two_sockets(t), t.set_quota("800000 100000", version=1)),
        r(48), 4, 1, [[r(12)], [r(12, 24)], [r(12)], [r(12, 24)]], 2, "",
    ),
    "cgroup v1, quota of 8, 3 replicas: 25% waste": (
        lambda t: (t.add_cpus(smt(24)), t.set_quota("800000 100000", version=1)),
        r(48), 3, 1, [[r(24)]] * 3, 2,
        "3 replicas of 1 rank with 2 threads use 6 of 8 cores and leave 25% idle, since each rank stays within a NUMA "
        "node and all have the same number of threads; --serve.replicas 2 or 4 would use all",
    ),
    "cgroup v1 without a quota": (
        lambda t: (t.add_cpus(single(range(8))), t.set_quota("-1 100000", version=1)), r(8), 1, 1, [[r(8)]], 8, ""
    ),
    "cgroup v2, quota of 2.5 cores": (
        lambda t: (t.add_cpus(single(range(8))), t.set_quota("250000 100000")), r(8), 1, 1, [[r(8)]], 2, ""
    ),
    "cgroup v2, the outer of nested groups is the tightest": (
        lambda t: (t.add_cpus(single(range(8))), t.set_quota("max 100000", "300000 100000", "600000 100000")),
        r(8), 3, 1, [[r(8)]] * 3, 1, "",
    ),
    "files without a meaning": (
        lambda t: (t.add_cpus(single(range(4)), speed=1), t.set_quota("", "x y", "100000 0x1"),
                   t.write("cpu/cpu1/cpu_capacity", "?"), t.write("node/node0/cpulist", ""), t.write("cpu/online", "")),
        r(4), 2, 1, [[(0, 1)], [(2, 3)]], 2, "",
    ),
    "quota of half a core": (
        lambda t: (t.add_cpus(single(range(4))), t.set_quota("50000 100000")), r(4), 1, 1, [[r(4)]], 1, ""
    ),
    "affinity: 3 CPUs of 2 cores": (
        lambda t: t.add_cpus(smt(4)), (2, 3, 7), 1, 1, [[(2, 3)]], 2, ""
    ),
    "container with one core, 2 ranks share it": (
        lambda t: t.add_cpus(single(range(8))), (5,), 1, 2, [[(5,), (5,)]], 1, ""
    ),
    "offline CPUs in the affinity": (
        lambda t: (t.add_cpus(single(range(4))), t.write("cpu/online", "0-1,3")), r(4), 1, 1, [[(0, 1, 3)]], 3, ""
    ),
    "more replicas than cores, as many as hardware threads": (
        lambda t: t.add_cpus(smt(2)), r(4), 4, 1, [[(0,)], [(2,)], [(1,)], [(3,)]], 1, ""
    ),
    "no files at all": (lambda t: None, (4, 6), 2, 1, [[(4,)], [(6,)]], 1, ""),
}  # fmt: skip
"""Name: (files, affinity, replicas, ranks, CPUs of each rank of each replica, threads, warning)."""


@pytest.mark.parametrize("name", MACHINES)
def test_placement(name: str, tree: Tree):
    build, allowed, replicas, ranks, blocks, threads, warning = MACHINES[name]
    build(tree)
    machine = read_machine(tree.sys, tree.proc, allowed)
    placements = place_replicas(machine, replicas, ranks)
    assert [list(each.ranks) for each in placements] == blocks
    assert {each.threads for each in placements} == {threads}
    found = idle_warning(machine, replicas, ranks)
    assert warning in found and bool(warning) == bool(found)
    node = {cpu.number: cpu.node for cpu in machine.cpus}
    assert all(len({node[cpu] for cpu in rank}) == 1 for each in placements for rank in each.ranks)


def machine_of(nodes: int, per_node: int, **fields: float) -> Machine:
    cpus = tuple(Cpu(i, i, node=i // per_node) for i in range(nodes * per_node))
    return Machine(cpus, **fields)  # type: ignore[arg-type]


def test_auto_is_a_replica_for_each_node_that_it_needs():
    assert auto_replicas(machine_of(1, 16)) == 1
    assert auto_replicas(machine_of(2, 12)) == 2
    assert auto_replicas(machine_of(4, 2)) == 4
    assert auto_replicas(machine_of(2, 12), ranks=2) == 1, "a rank in each node uses all cores"
    assert auto_replicas(machine_of(2, 12, quota=8.0)) == 1, "the quota fits into one node"
    assert auto_replicas(machine_of(2, 12, quota=20.0)) == 2
    assert auto_replicas(machine_of(1, 1), ranks=4) == 1


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (machine_of(1, 8), r"9 replicas need one core each, and this process may use 8 cores; .* at most 8"),
        (machine_of(1, 8, quota=2.5), r"9 replicas .* 8 cores within a CPU quota of 2.5; .* at most 2"),
        (machine_of(1, 1, quota=0.5), r"9 replicas .* 1 core within a CPU quota of 0.5; .* at most 1"),
    ],
)
def test_more_replicas_than_cores_are_refused(machine: Machine, message: str):
    with pytest.raises(ConfigError, match=message):
        place_replicas(machine, 9)
    with pytest.raises(ConfigError):
        idle_warning(machine, 9)


def test_programs_have_any_names(tree: Tree):
    """The kernel cuts them after 15 bytes, within a letter."""
    tree.add_cpus(single(range(4)))
    tree.run_on(2)
    stat = tree.proc / "self/stat"
    stat.write_bytes(stat.read_bytes().replace(b"a (b) c", "обслуживание".encode()[:15]))
    assert read_machine(tree.sys, tree.proc, r(4)).here == 2


@pytest.mark.parametrize("name", [b"pl\xe4ne", "a\u2028b".encode(), b"a\x0cb"])
def test_folders_that_are_mounted_have_any_names(name: bytes, tree: Tree):
    tree.add_cpus(single(range(4)))
    tree.set_quota("100000 0", "200000 100000")
    mounts = tree.proc / "self/mountinfo"
    mounts.write_bytes(b"25 1 8:1 / /media/" + name + b" rw - vfat /dev/sdb1 rw\n" + mounts.read_bytes())
    assert read_machine(tree.sys, tree.proc, r(4)).quota == 2


def test_every_division_is_disjoint_and_even():
    """Replicas never share a core of their own, and have equally many; exhaustive over small machines."""
    for nodes in (1, 2, 3):
        for per_node in (1, 2, 5):
            machine = machine_of(nodes, per_node)
            for replicas in range(1, nodes * per_node + 1):
                placements = place_replicas(machine, replicas)
                given = [cpu for each in placements for cpu in each.cpus]
                assert len(given) == len(set(given)) == replicas * placements[0].threads
                assert {len(each.cpus) for each in placements} == {placements[0].threads}


def test_threads_that_own_their_cores_spin_briefly():
    for machine, owned in [
        (machine_of(1, 4), True),
        (machine_of(1, 4, load=0.5), False),
        (machine_of(1, 4, quota=3.0), False),
        (machine_of(1, 4, quota=4.0), True),
    ]:
        assert place_replicas(machine, 2)[0].owned is owned
    assert not place_replicas(Machine((Cpu(0, 0), Cpu(1, 0))), 2)[0].owned, "two hardware threads share a core"


@pytest.mark.parametrize(
    ("minute", "ticks", "expected"),
    [
        (0.1, (0, 0), 0.1),  # not watched at all
        (0.9, (1, 9), 0.1),  # a server has just ended
        (0.9, (8, 2), 0.8),
        (0.5, (9, 1), 0.5),
        (0.9, (0, 0), 0.9),  # the kernel does not tell
    ],
)
def test_a_busy_minute_is_forgotten_where_the_cores_are_idle_now(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, minute: float, ticks: tuple[int, int], expected: float
):
    """Only this process's CPUs count; time spent as a guest is also part of user time."""
    tree.add_cpus(single(range(4)))
    monkeypatch.setattr("os.getloadavg", lambda: (minute * (os.cpu_count() or 1), 0.0, 0.0))
    tree.proc.mkdir()
    stat = tree.proc / "stat"

    def write(busy: int, idle: int) -> None:
        own = [f"cpu{i} {100 + busy} 2 3 {400 + idle} 5 6 7 8 100 2" for i in (0, 1)]
        stat.write_text("\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *own, f"cpu2 {100 * busy} 0 0 0 0 0 0 0 0 0", "intr 5"]))

    write(0, 0)
    monkeypatch.setattr("time.sleep", lambda _: write(*ticks))
    assert read_machine(tree.sys, tree.proc, (0, 1)).load == pytest.approx(expected)


def test_openmp_variables():
    environ: dict[str, str] = {}
    set_openmp(environ, 4, owned=True)
    assert environ == {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(cores.SPIN_COUNT)}
    set_openmp(environ, 2, owned=False)  # an engine that the process above starts on shared cores
    assert environ == {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    set_openmp(environ, 3, owned=True)
    assert environ["OMP_NUM_THREADS"] == "2", "fewer threads than allowed are the user's choice"
    for name in cores.OPENMP_VARIABLES:
        set_openmp(environ := {name: "7", "OMP_NUM_THREADS": "x"}, 1, owned=True)
        assert environ == {name: "7", "OMP_NUM_THREADS": "1"}


def test_set_openmp_alone_keeps_the_number_of_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cores, "read_machine", lambda: machine_of(1, 8))
    environ = {"OMP_NUM_THREADS": "99"}
    cores.set_openmp_unpinned(environ)
    assert environ["OMP_NUM_THREADS"] == "99" and environ["OMP_WAIT_POLICY"] == "PASSIVE"
    environ = {"LOCAL_WORLD_SIZE": "4"}
    cores.set_openmp_unpinned(environ)
    assert environ["OMP_NUM_THREADS"] == "2"


@pytest.mark.slow
def test_every_verb_sets_openmp_before_it_imports_torch(tmp_path: Path):
    """A module given by --import runs before any verb does."""
    (tmp_path / "spy.py").write_text(
        "import os, sys\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "print(os.environ['OMP_WAIT_POLICY'], torch.get_num_threads())\n"
    )
    environ = {
        name: text for name, text in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_"))
    }
    path = os.pathsep.join([str(tmp_path), *sys.path])
    printed = subprocess.run(
        [sys.executable, "-m", "colonnade", "presets", "--match", "tour", "--import", "spy"],
        env=environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert printed.splitlines()[0] == f"PASSIVE {read_machine().usable}"
