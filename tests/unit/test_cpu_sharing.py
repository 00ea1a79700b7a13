"""OpenMP's threads sleep where cores are shared, unless the user decides."""

from pathlib import Path

import pytest

from colonnade.serve import cpu_sharing


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "800000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8.0),
    ],
)
def test_quota_of_cgroups(tmp_path: Path, files: dict[str, str], quota: float | None):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_sharing.cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("load", "shared"), [(0.0, False), (1000.0, True)])
def test_threads_sleep_on_busy_cores_only(monkeypatch: pytest.MonkeyPatch, load: float, shared: bool):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(cpu_sharing, "cpu_quota", lambda: None)
    environ: dict[str, str] = {}
    cpu_sharing.let_threads_sleep(environ)
    assert environ == ({"OMP_WAIT_POLICY": "PASSIVE"} if shared else {})
    for name in cpu_sharing.OPENMP_VARIABLES:
        cpu_sharing.let_threads_sleep(environ := {name: "7"})
        assert environ == {name: "7"}
