"""The committed build: complete, small, and equal to a new one."""

import gzip
import shutil
import subprocess
from pathlib import Path

import pytest

from colonnade.look.app import FILES, static_file

ROOT = Path(__file__).parents[2]
STATIC, SOURCES = ROOT / "colonnade/look/static", ROOT / "viewer"
LIMIT = 400_000


def test_bundle_is_small_and_complete() -> None:
    files = {path.name: path.read_bytes() for path in STATIC.iterdir()}
    assert set(files) == {name for name, _ in FILES.values()}
    assert sum(len(gzip.compress(data)) for data in files.values()) <= LIMIT
    page = files["index.html"].decode()
    assert "<script>" not in page and "http" not in page.replace("https://", "http").split("<body>")[1]
    for path in FILES:
        assert static_file(path) is not None
    assert static_file("../app.py") is None and static_file("index.html/..") is None


@pytest.mark.slow
def test_committed_build_equals_a_new_one(tmp_path: Path) -> None:
    """And the types are right, and the TypeScript tests pass."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm: apt-get install npm")
    if not (SOURCES / "node_modules").is_dir():
        pytest.skip("needs the viewer's packages: make viewer")
    for command in (
        ["tsc", "--noEmit"],
        ["vitest", "run"],
        ["vite", "build", "--outDir", str(tmp_path / "out"), "--emptyOutDir"],
    ):
        done = subprocess.run(
            [str(SOURCES / "node_modules/.bin" / command[0]), *command[1:]],
            cwd=SOURCES,
            capture_output=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr).decode()[-3000:]
    for built in (tmp_path / "out").iterdir():
        assert built.read_bytes() == (STATIC / built.name).read_bytes(), f"{built.name} is old: run make viewer"
