"""Programs from the fork server are to their requester what programs started by exec are."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests import fork_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server needs Linux")

REPORT = """
import json, os, signal, sys, warnings
file = __file__
masked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
print(json.dumps({
    "parent": os.getppid(), "folder": os.getcwd(), "words": sys.argv[1:], "variable": os.environ.get("VARIABLE"),
    "session": os.getsid(0) == os.getpid(), "file": file, "input": sys.stdin.read(), "masked": masked,
    "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"), "path": sys.path[0],
    "affinity": sorted(os.sched_getaffinity(0)), "options": sys.warnoptions, "name": __name__,
    "umask": os.umask(0),
}))
sys.stderr.write("to stderr\\n")
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "report.py"
    file.write_text(REPORT)
    return file


def forked(pid: int) -> bool:
    """Whether a program's memory is that of a process that has imported torch."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_a_script_sees_what_exec_would_show_it(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error::RuntimeWarning", str(script), "a", "b c"]
    options = {"cwd": tmp_path, "env": os.environ | {"VARIABLE": "x", "CODE": "7"}, "start_new_session": True}
    results = []
    for how in (fork_server.start_by_exec, contextlib.nullcontext):
        with how():
            results.append(
                subprocess.run(command, check=False, input="typed", capture_output=True, text=True, **options)
            )
    executed, by_fork = results
    assert by_fork.returncode == executed.returncode == 7
    assert (by_fork.stdout, by_fork.stderr) == (executed.stdout, executed.stderr)
    assert f'"parent": {os.getpid()}' in by_fork.stdout and '"session": true' in by_fork.stdout


def test_ends_are_those_of_exec(tmp_path: Path) -> None:
    """A message, a traceback, a signal, an exit handler, a thread that is waited for."""
    file = tmp_path / "end.py"
    for code, wanted, text in (
        ("sys.exit('why')", 1, "why\n"),
        ("raise KeyError('no')", 1, "KeyError: 'no'\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("atexit.register(lambda: sys.stderr.write('bye\\n'))", 0, "bye\n"),
        ("threading.Timer(0.1, lambda: sys.stderr.write('late\\n')).start()", 0, "late\n"),
    ):
        file.write_text(f"import atexit, os, signal, sys, threading\n{code}\n")
        done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == wanted and done.stderr.endswith(text), (code, done)


def _spawned(pipe: Connection) -> None:
    context = multiprocessing.get_context("spawn")
    os.setsid()
    child = context.Process(target=_grandchild, args=(pipe,))
    child.start()
    child.join()
    pipe.send((os.getpid(), os.getppid(), os.getsid(0), forked(os.getpid()), child.exitcode))


def _grandchild(pipe: Connection) -> None:
    pipe.send((os.getpid(), os.getppid(), os.getsid(0), forked(os.getpid())))
    sys.exit(3)


def test_children_of_children_are_forked_in_their_session() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_spawned, args=(theirs,))
    child.start()
    grandchild, parent, session, was_forked = ours.recv()
    assert parent == session == child.pid != grandchild and was_forked
    assert ours.recv() == (child.pid, os.getpid(), child.pid, True, 3)
    child.join()
    assert child.exitcode == 0


def test_variables_read_at_import_need_an_exec(script: Path) -> None:
    """And so does code on the command line."""
    code = "import sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True).stdout == "False\n"
    script.write_text("import os, tests; print('libtorch' in open('/proc/self/maps').read())")
    root = str(fork_server.ROOT)
    for threads, path in (("1", root), ("2", root), ("1", f"{root}:{script.parent}")):
        variables = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, str(script)], check=False, env=variables, capture_output=True, text=True)
        assert done.stdout == f"{(threads, path) == (os.environ['OMP_NUM_THREADS'], root)}\n", done


def test_a_killed_program_is_reaped_by_its_requester(script: Path) -> None:
    script.write_text("import time; print(1, flush=True); time.sleep(600)")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        assert forked(process.pid)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{process.pid}").exists()
