import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CONFTEST = """
from tests import forked_workers

def pytest_runtestloop(session):
    forked_workers.run(session, 2, lambda: None)
    return True
"""

CRASH = """
import os

def test_before():
    assert True

def test_crash():
    os._exit(7)

def test_after():
    assert True
"""

FAILURE = """
import sys
import pytest

@pytest.fixture(scope="session")
def once(tmp_path_factory):
    print("written by the fixture")
    return tmp_path_factory.mktemp("once")

def test_failure(once):
    print("written by the test")
    assert once.is_file()

@pytest.mark.skip(reason="for a reason")
def test_skipped():
    pass
"""


def outcome(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rsf", *options, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_crash_fails_one_test_and_the_rest_run(tmp_path: Path) -> None:
    (tmp_path / "test_crash.py").write_text(CRASH)
    (tmp_path / "test_failure.py").write_text(FAILURE)
    code, text = outcome(tmp_path)
    assert code == 1
    assert "2 failed, 2 passed, 1 skipped" in text
    assert "test_crash.py::test_crash" in text
    assert "died with exit code 7" in text
    assert "written by the fixture" in text
    assert "written by the test" in text
    assert "for a reason" in text


def test_the_first_failure_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_failure.py").write_text(FAILURE)
    code, text = outcome(tmp_path, "-x")
    assert code == 1
    assert "1 failed" in text
    assert "stopping after 1 failures" in text
    assert "skipped" not in text.splitlines()[-1]
