"""Starts Python programs as forks of a process that has imported torch: in milliseconds, where an exec takes seconds.

Tests start hundreds of Python processes, which spend most of their time importing torch. After ``install`` this process
asks a fork server for the programs in ``PROGRAMS`` and for multiprocessing's spawned children, whose children come from
fork servers of their own. All else, and what sets variables that are read at import, still starts by exec.

    requester ── fork server ── intermediate ── program

The intermediate exits at once. The requester is a child subreaper meanwhile, so the kernel makes the program its child,
to be waited for and killed as after an exec. The program gets the requester's variables, folder, files, signals and
affinity, and its own command line in /proc. Linux only.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import itertools
import json
import multiprocessing.util
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

IMPORTS = (
    "torch.distributed.pipelining", "torch.distributed.fsdp", "torch.distributed.run", "colonnade.api",
    "colonnade.checkpoint.dcp_storage", "colonnade.parallel.overlapped_matmul", "colonnade.train.loop",
    "colonnade.verify.run", "colonnade.serve.server", "colonnade.serve.worker", "colonnade.cli.main",
)  # fmt: skip
"""Imported once, by the fork server."""

PROGRAMS = (
    ("-m", "colonnade"), ("-m", "tests.serve.serving"), ("-m", "torch.distributed.run"),
    ("-c", "from multiprocessing.spawn import"),
)  # fmt: skip
"""Options that start a program by fork, and how their values begin; files (``python FILE.py``) do too."""

READ_AT_IMPORT = (
    "PYTHON", "OMP_NUM", "MKL_", "OPENBLAS_", "TRITON_", "CUDA_", "TORCH_", "LD_", "HF_", "HOME", "XDG_", "PROMETHEUS_",
)  # fmt: skip
"""Prefixes of variables that modules read when they are imported: a program with other values starts by exec."""
NOT_READ = ("PYTHONDONTWRITE", "PYTHONPATH", "TORCH_NCCL", "TORCH_SYMM")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Ignored by a program if its requester ignores them, as after an exec."""

ROOT = Path(__file__).parents[1]

PADDING = 8192
"""Bytes of the fork server's command line, over which each program writes its own."""
PR_SET_CHILD_SUBREAPER = 36
MADV_COLLAPSE = 25
HUGE_PAGE = 2 << 20
libc = ctypes.CDLL(None)


def install() -> None:
    """Let this process, and those that it starts, start Python programs by fork."""
    if sys.platform == "linux":
        Client().patch()


@contextlib.contextmanager
def start_by_exec() -> Iterator[None]:
    """Programs that this process starts in the block start by exec."""
    before, Client.disabled = Client.disabled, True
    try:
        yield
    finally:
        Client.disabled = before


def _read_at_import(variables: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in variables.items() if name.startswith(READ_AT_IMPORT)}
    return {name: value for name, value in kept.items() if not name.startswith(NOT_READ)}


def _folders(variables: dict[str, str], cwd: str) -> set[Path]:
    """The folders of PYTHONPATH."""
    return {Path(cwd, folder).resolve() for folder in variables.get("PYTHONPATH", "").split(os.pathsep) if folder}


def _words(command: list[str]) -> tuple[list[str], list[str]]:
    """(-B, -u and the values of -W, the words after them) of a command; no words if others are among them."""
    options, rest = [], command[1:]
    while rest and rest[0].startswith(("-B", "-u", "-W")):
        word, *rest = rest
        options.append(word.removeprefix("-W") or rest.pop(0))
    known = bool(rest) and (rest[0] in ("-m", "-c") or rest[0].endswith(".py"))
    return options, rest if known else []


# -- the requester -----------------------------------------------------------------------------------------------------


class Client:
    """Asks for programs; ``server`` is the connection of a fork server that this process already has."""

    disabled = False

    def __init__(self, server: socket.socket | None = None) -> None:
        self.server, self.root, self.lock = server, server is None, threading.Lock()
        self.all_variables = dict(os.environ)
        self.variables = _read_at_import(self.all_variables)
        self.folders = {ROOT, *_folders(self.all_variables, ".")}
        self.originals = subprocess._fork_exec, multiprocessing.util.spawnv_passfds, os.setsid

    def patch(self) -> None:
        """Replace the functions by which this process starts others."""
        subprocess._fork_exec, multiprocessing.util.spawnv_passfds, os.setsid = self._popen, self._spawn, self._setsid
        os.register_at_fork(after_in_child=self._unpatch)

    def _unpatch(self) -> None:
        """In a fork, which is not the fork server's parent."""
        subprocess._fork_exec, multiprocessing.util.spawnv_passfds, os.setsid = self.originals
        if self.server is not None:
            self.server.close()

    def _popen(self, *arguments: Any) -> int:
        """In the place of ``_posixsubprocess.fork_exec``, with its arguments."""
        if len(arguments) == 23:  # as in Python 3.11 to 3.13
            args, _, close_fds, keep, cwd, env, p2cread, _, _, c2pwrite, _, errwrite, _, errpipe = arguments[:14]
            _, new_session, group, gid, gids, uid, umask, before_exec, _ = arguments[14:]
            plain = close_fds and group == -1 and gid is gids is uid is before_exec is None and umask < 0
            command = [os.fsdecode(word) for word in args]
            variables = dict(os.environ) if env is None else dict(os.fsdecode(pair).split("=", 1) for pair in env)
            standard = {i: fd if fd >= 0 else i for i, fd in enumerate((p2cread, c2pwrite, errwrite))}
            files = standard | {fd: fd for fd in keep if fd != errpipe}
            if plain and (pid := self._fork(command, variables, files, cwd and os.fsdecode(cwd), bool(new_session))):
                return pid
        return self.originals[0](*arguments)

    def _spawn(self, path: Any, args: Any, passfds: Any) -> int:
        """In the place of ``multiprocessing.util.spawnv_passfds``."""
        command = [os.fsdecode(word) for word in args]
        files = {fd: fd for fd in (0, 1, 2, *passfds)}
        return self._fork(command, dict(os.environ), files, None, False) or self.originals[1](path, args, passfds)

    def _setsid(self) -> None:
        """A new session needs a fork server in it."""
        self.originals[2]()
        if self.server is not None and not self.root:
            self.server.close()
            self.server = _serve_in_child()

    def _fork(
        self, command: list[str], variables: dict[str, str], files: dict[int, int], cwd: str | None, new_session: bool
    ) -> int:
        """The pid of the new program; 0 if it must start by exec."""
        _, words = _words(command)
        known = words and (
            words[0].endswith(".py") or any(words[0] == option and words[1].startswith(it) for option, it in PROGRAMS)
        )
        cwd = cwd or str(Path.cwd())
        same = _read_at_import(variables) == self.variables and _folders(variables, cwd) <= self.folders
        if Client.disabled or not known or not same or command[0] != sys.executable:
            return 0
        request = {
            "command": command, "variables": variables, "files": list(files), "cwd": cwd,
            "new_session": new_session, "affinity": sorted(os.sched_getaffinity(0)),
            "ignored": [int(number) for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN],
            "umask": int(re.search(r"^Umask:\t(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE)[1], 8),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }  # fmt: skip
        with self.lock:
            if self.server is None:
                self.server = _start(self.all_variables)
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self.server, [json.dumps(request).encode()], list(files.values()))
                pid = int(self.server.recv(64) or 0)
            except OSError:
                pid = 0
            finally:
                libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        # A signal to its process group ends the fork server of a program.
        assert pid or not self.root, "the fork server has ended; why: python -m tests.fork_server 0"
        return pid


def _start(variables: dict[str, str]) -> socket.socket:
    """Start a fork server by exec; returns its connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    null = subprocess.DEVNULL
    with theirs, start_by_exec():
        command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), " " * PADDING]
        files = {"pass_fds": [theirs.fileno()], "stdin": null, "stdout": null, "stderr": null}
        server = subprocess.Popen(command, cwd=ROOT, env=variables, **files)

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


# -- the fork server ---------------------------------------------------------------------------------------------------


def _serve_in_child() -> socket.socket:
    """Fork this process as a fork server; returns its connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        _become_server(theirs)
    theirs.close()
    return ours


def _become_server(connection: socket.socket) -> NoReturn:
    """Serve ``connection`` without any other file of this process, which the program may want to close."""
    fd = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    _close_all_but(fd)
    connection.detach()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(socket.socket(fileno=fd))


def _serve(connection: socket.socket) -> NoReturn:
    """Fork a program for each request until the requester has gone."""
    _set_command_line(["fork server for", str(os.getppid())])
    while True:
        data, files, _, _ = socket.recv_fds(connection, 1 << 20, 250)
        if not data:
            os._exit(0)
        read, write = os.pipe()
        if not (middle := os.fork()):
            middle = os.getpid()
            if pid := os.fork():
                os.write(write, str(pid).encode())
                os._exit(0)
            request = json.loads(data)
            connection.detach()
            _take_files(files, request["files"])
            while os.getppid() == middle:
                time.sleep(0.0002)
            _run(request)
        os.close(write)
        pid = os.read(read, 64)
        os.waitpid(middle, 0)
        for fd in (read, *files):
            os.close(fd)
        with contextlib.suppress(BrokenPipeError):
            connection.send(pid)


def _take_files(files: list[int], numbers: list[int]) -> None:
    """Give the received ``files`` their ``numbers``; close everything else."""
    top = max((*numbers, *files, 64)) + 1
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, top) for fd in files]
    for fd, number in zip(copies, numbers, strict=True):
        os.dup2(fd, number)
    _close_all_but(*numbers)


def _close_all_but(*kept: int) -> None:
    edges = [2, *sorted(fd for fd in kept if fd > 2), os.sysconf("SC_OPEN_MAX")]
    for before, after in itertools.pairwise(edges):
        os.closerange(before + 1, after)


def _set_command_line(words: list[str]) -> None:
    """What /proc/PID/cmdline shows, as far as the first command line had room."""
    start, end = map(int, Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[45:47])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


# -- the program -------------------------------------------------------------------------------------------------------


def _run(request: dict[str, Any]) -> NoReturn:
    """Become the program, with what ``request`` gives it."""
    options, words = _words(request["command"])
    _set_command_line(request["command"])
    if request["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["cwd"])
    sys.path[1:1] = [str(folder) for folder in _folders(request["variables"], request["cwd"])]
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["affinity"])
    for number in SIGNALS:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    tempfile.tempdir = None
    _open_standard_files(unbuffered="-u" in options)
    sys.dont_write_bytecode = "-B" in options
    sys.warnoptions[:] = [option for option in options if option not in ("-B", "-u")]
    warnings._processoptions(sys.warnoptions)
    Client(_serve_in_child()).patch()
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    _end(words)


def _open_standard_files(*, unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 - open for the life of the process
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = open(fd, "wb", 0, closefd=False)  # noqa: SIM115
        usual = getattr(sys, f"__{name}__")
        options = {"write_through": True} if unbuffered else {"line_buffering": fd == 2 or os.isatty(fd)}
        buffer = raw if unbuffered else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(buffer, usual.encoding, usual.errors, **options)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _execute(words: list[str]) -> None:
    """``python WORDS…``."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    first, *rest = words
    if first == "-m":
        sys.argv, sys.path[0] = rest, str(Path.cwd())
        if not hasattr(sys.modules.get(rest[0]), "__path__"):
            sys.modules.pop(rest[0], None)  # else runpy warns
        runpy._run_module_as_main(rest[0])
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = words, str(Path(first).parent)
        main.__dict__["__file__"] = first
        exec(compile(Path(first).read_bytes(), first, "exec"), main.__dict__)


def _end(words: list[str]) -> NoReturn:
    """Run the program and end this process like the interpreter, but leave its memory, of seconds, to the system."""
    code: object = 0
    try:
        _execute(words)
    except SystemExit as stop:
        code = stop.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _forget_exit_functions() -> None:
    """Leave out what torch does for 0.1 s at the exit of each process: freeing operators, summing up compile times."""
    from torch._dynamo.utils import dump_compile_times

    atexit.unregister(dump_compile_times)
    for info in weakref.finalize._registry.values():  # pyrefly: ignore[missing-attribute]
        info.atexit = False


def _use_huge_pages() -> None:
    """Collapse this process's memory into huge pages, so that a fork takes 2 ms and not 8: it copies the page tables.

    Linux before 6.1 refuses, and forks are slower.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        if match := re.fullmatch(r"(\w+)-(\w+) rw-p 0+ 00:00 0 *(\[heap\])?", line):
            start, end = -(-int(match[1], 16) // HUGE_PAGE) * HUGE_PAGE, int(match[2], 16) // HUGE_PAGE * HUGE_PAGE
            if start < end:
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def main() -> None:
    """Serve the requester on the file descriptor that is the first argument."""
    for module in IMPORTS:
        importlib.import_module(module)
    _forget_exit_functions()
    gc.collect()
    gc.freeze()
    _use_huge_pages()
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
