"""Loads ``decode.cpp`` (with its headers), compiled for the processor's instruction set.

    avx512     AVX-512 with VNNI
    avx2       AVX2 with FMA
    portable   any other processor, in vectors of four floats; only on request on x86-64, where torch is faster

A wheel has the libraries of its platform in ``built`` (``hatch_build.py``); their file names have a hash of source,
headers and options. Without them the system's compiler runs at first use, which takes some seconds, once. A compiled
library's file name is a hash of all that it depends on: source, headers, options, compiler and its version. The file
ends with a checksum, so that a damaged one is compiled again, and is written under a temporary name and then renamed,
so that processes may compile at the same time. A library is loaded from the cache only if no other user can have
written it; otherwise it is compiled into a private folder.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decode.cpp")
CACHE_FOLDER = Path("~/.cache/colonnade/kernels")
"""Where libraries are cached; if it is not usable, every process compiles its own."""
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
)
"""No contraction: a sum must not depend on what the compiler fuses for one tile and not for another."""
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}
"""Compiler options by instruction set, the preferred first."""
CPU_FLAGS = {
    "avx512": frozenset(("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "fma")),
    "avx2": frozenset(("avx2", "fma")),
}
"""Flags that /proc/cpuinfo must list."""
COST = "decode steps run in torch, which takes several times as long on this CPU"
COMPILE_LIMIT_S = 300
HASH_BYTES = 32


class BuildError(Exception):
    """The library cannot be compiled or loaded; the message states why."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library for this processor; None, after one warning, if it cannot be had."""
    try:
        return load_for(best_instruction_set(Path("/proc/cpuinfo")))
    except BuildError as error:
        log.warning("no C++ kernels (%s): %s", error, COST)
        return None


def best_instruction_set(cpuinfo: Path) -> str:
    """The preferred instruction set of this processor; raises BuildError if torch is faster on it."""
    if sys.platform != "linux":
        raise BuildError(f"they are for Linux, and this is {sys.platform}")
    if platform.machine() != "x86_64":
        return "portable"
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError as error:
        raise BuildError(f"the processor's features cannot be read: {error}") from None
    flags = set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
    for name, needed in CPU_FLAGS.items():
        if needed <= flags:
            return name
    raise BuildError("the processor has no AVX2")


@functools.cache
def load_for(instruction_set: str) -> ctypes.CDLL:
    """The library for one of :data:`INSTRUCTION_SETS`, compiled if no wheel or cache has it; raises BuildError."""
    if (path := SOURCE.parent / "built" / built_name(instruction_set)).is_file():
        try:
            return _bind(path)
        except BuildError as error:  # e.g. built for a newer C library
            log.warning("%s; compiling it", error)
    return _bind(_compiled(instruction_set, CACHE_FOLDER.expanduser()))


def built_name(instruction_set: str) -> str:
    """The file name of a library in a wheel."""
    return f"{instruction_set}-{_digest(_options(instruction_set))[:16]}.so"


def build_all(folder: Path) -> list[Path]:
    """Compile what a wheel for this machine's kind has, into ``folder``; raises BuildError."""
    names = [name for name in INSTRUCTION_SETS if (name in CPU_FLAGS) == (platform.machine() == "x86_64")]
    return [_compile(_compiler(), _options(name), folder / built_name(name)) for name in names]


def _options(instruction_set: str) -> list[str]:
    return [*OPTIONS, *INSTRUCTION_SETS[instruction_set]]


def _digest(parts: list[str]) -> str:
    """A hash of all sources and of ``parts``."""
    return hashlib.sha256("\0".join([*(path.read_text() for path in sources()), *parts]).encode()).hexdigest()


def _bind(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the compiled library does not load: {error}") from None
    library.colonnade_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.colonnade_run.restype = ctypes.c_int64
    library.colonnade_lanes.restype = ctypes.c_int64
    return library


def _compiled(instruction_set: str, folder: Path) -> Path:
    """The library's file, in ``folder`` if that can be trusted, otherwise in a new private folder."""
    compiler, options = _compiler(), _options(instruction_set)
    version = _run([compiler, "--version"]).splitlines()[0]
    name = _digest([*options, compiler, version]) + ".so"
    path = folder / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if problem := untrusted(folder):
            raise OSError(problem)
        if _is_whole(path):
            return path
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            _compile(compiler, options, Path(temporary) / name).replace(path)
    except OSError as error:
        try:
            path = _compile(compiler, options, Path(tempfile.mkdtemp(prefix="colonnade-")) / name)
        except OSError as other:  # as in a container that may not write
            raise BuildError(f"there is no folder to compile in ({error}; {other})") from None
        log.warning("compiled kernels are not cached: %s", error)
    return path


def sources() -> list[Path]:
    """The translation unit and the headers, which are all those of its folder."""
    return [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]


def untrusted(path: Path) -> str | None:
    """Why ``path`` may have been written by somebody else; None if it cannot."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {path}; chmod go-w {path}"
    return None


def _compiler() -> str:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no compiler: install one of {', '.join(COMPILERS)}")
    return compiler


def _is_whole(path: Path) -> bool:
    """Whether ``path`` is a library that this user wrote, with its checksum."""
    try:
        if untrusted(path) is not None:
            return False
        data = path.read_bytes()
    except OSError:
        return False
    binary = data[:-HASH_BYTES]
    return bool(binary) and hashlib.sha256(binary).digest() == data[-HASH_BYTES:]


def _compile(compiler: str, options: list[str], path: Path) -> Path:
    """Compile to ``path`` and append the checksum, which loaders ignore."""
    _run([compiler, *options, "-o", str(path), str(SOURCE)])
    binary = path.read_bytes()
    with path.open("ab") as file:
        file.write(hashlib.sha256(binary).digest())
    path.chmod(0o700)
    return path


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise BuildError(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[0])}")
    return done.stdout or "\n"
