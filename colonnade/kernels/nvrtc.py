"""CUDA C++ kernels compiled at run time by NVRTC, their binaries cached on disk.

NVRTC and the driver are called through cuda-bindings, which torch's CUDA wheels bring along: neither nvcc nor a build
at installation is needed. A binary's file is named by a hash of all that it depends on: source, options, architecture
and the version of NVRTC (machine code does not depend on the driver, which checks it when it loads it). It begins with
its own hash, so that a damaged file is compiled again, and is written under another name first and then renamed.
"""

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)
FOLDER = Path("~/.cache/colonnade/kernels")
"""Where binaries are kept; where it cannot be written they are compiled in each process."""
HASH_BYTES = 32


@functools.cache
def unavailable() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    try:
        _version()
    except (RuntimeError, OSError, ImportError) as why:  # the package finds its library when it is first called
        return f"NVRTC does not load ({str(why).splitlines()[0]})"
    return None


def compiled(source: str, options: Sequence[str], arch: str, folder: Path | None = None) -> bytes:
    """The binary (cubin) of CUDA C++ for ``arch``, such as "sm_90", from the cache where it is there.

    Raises RuntimeError with the compiler's log where the source is wrong.
    """
    key = [source, *options, arch, "NVRTC {}.{}".format(*_version())]
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()
    path = (folder or FOLDER.expanduser()) / f"{name}.cubin"
    found = _read(path)
    if found is None:
        found = _compile(source, [f"--gpu-architecture={arch}", *options])
        _write(path, found)
    return found


def _read(path: Path) -> bytes | None:
    """What is in a file of the cache; None where it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    binary = data[HASH_BYTES:]
    return binary if binary and hashlib.sha256(binary).digest() == data[:HASH_BYTES] else None


def _write(path: Path, binary: bytes) -> None:
    """Into the cache, whole or not at all; what a folder does not take is compiled again by the next process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as file:
            file.write(hashlib.sha256(binary).digest() + binary)
        Path(file.name).replace(path)
    except OSError as why:
        log.warning("compiled kernels are not kept: %s", why)


def _nvrtc() -> Any:
    return importlib.import_module("cuda.bindings.nvrtc")


def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


@functools.cache
def _version() -> tuple[int, int]:
    """Of NVRTC."""
    error, major, minor = _nvrtc().nvrtcVersion()
    if error:
        raise RuntimeError(f"nvrtcVersion: {error}")
    return major, minor


def _compile(source: str, options: Sequence[str]) -> bytes:
    nvrtc = _nvrtc()

    def checked(result: tuple[Any, ...]) -> Any:
        if result[0]:
            raise RuntimeError(f"NVRTC: {result[0]}")
        return result[1] if len(result) > 1 else None

    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if error:
            said = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
            checked(nvrtc.nvrtcGetProgramLog(program, said))
            raise RuntimeError(f"NVRTC with {' '.join(options)}:\n{said.decode(errors='replace').rstrip(chr(0))}")
        binary = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, binary))
        return bytes(binary)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class Kernel:
    """A kernel on the current device."""

    def __init__(self, binary: bytes, name: str, shared_bytes: int) -> None:
        """From a cubin; blocks take ``shared_bytes`` of shared memory."""
        torch.cuda.current_stream().synchronize()  # torch's context is made, and is the current one
        driver = self._driver = _driver()
        self.shared_bytes = shared_bytes
        # The module stays loaded as long as the process: graphs that were captured hold its functions.
        self._module = self._checked(driver.cuModuleLoadData(binary))
        self._function = self._checked(driver.cuModuleGetFunction(self._module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._checked(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))

    @staticmethod
    def _checked(result: tuple[Any, ...]) -> Any:
        if result[0]:
            raise RuntimeError(f"CUDA driver: {result[0]}")
        return result[1] if len(result) > 1 else None

    def launch(self, blocks: int, threads: int, arguments: bytes, *, cooperative: bool = False) -> None:
        """On torch's current stream; ``arguments`` is the kernel's one parameter, a struct.

        ``cooperative``: all blocks are resident at once, or the launch fails.
        """
        data = ctypes.create_string_buffer(arguments, len(arguments))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(data))
        call = self._driver.cuLaunchCooperativeKernel if cooperative else self._driver.cuLaunchKernel
        more = () if cooperative else (0,)
        self._checked(
            call(
                self._function, blocks, 1, 1, threads, 1, 1, self.shared_bytes,
                torch.cuda.current_stream().cuda_stream, ctypes.addressof(parameters), *more,
            )
        )  # fmt: skip
