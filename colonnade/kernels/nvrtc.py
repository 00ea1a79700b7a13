"""Compiles CUDA C++ kernels at run time with NVRTC and caches the binaries on disk.

NVRTC and the driver are called through cuda-bindings, which torch's CUDA wheels install: neither nvcc nor a build step
is needed. A binary's file name is a hash of all that it depends on: source, options, architecture and NVRTC version
(machine code does not depend on the driver, which validates it on loading). The file starts with a checksum, so that a
damaged one is recompiled, and is written under a temporary name and then renamed.
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
CACHE_FOLDER = Path("~/.cache/colonnade/kernels")
"""Where binaries are cached; if it is not writable, every process compiles them."""
HASH_BYTES = 32


@functools.cache
def unavailable_reason() -> str | None:
    """Why kernels cannot be compiled on this machine; None if they can."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    try:
        _version()
    except (RuntimeError, OSError, ImportError) as error:  # the package loads its library on the first call
        return f"NVRTC does not load ({str(error).splitlines()[0]})"
    return None


def compile_cubin(source: str, options: Sequence[str], arch: str, folder: Path | None = None) -> bytes:
    """The binary (cubin) of CUDA C++ source for ``arch``, such as "sm_90", cached on disk.

    Raises RuntimeError with the compiler's log if the source does not compile.
    """
    key = [source, *options, arch, "NVRTC {}.{}".format(*_version())]
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()
    path = (folder or CACHE_FOLDER.expanduser()) / f"{name}.cubin"
    cubin = _read_cache(path)
    if cubin is None:
        cubin = _compile(source, [f"--gpu-architecture={arch}", *options])
        _write_cache(path, cubin)
    return cubin


def _read_cache(path: Path) -> bytes | None:
    """The cached binary; None if the file is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    binary = data[HASH_BYTES:]
    return binary if binary and hashlib.sha256(binary).digest() == data[:HASH_BYTES] else None


def _write_cache(path: Path, binary: bytes) -> None:
    """Writes to the cache atomically; if that fails, the next process compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as file:
            file.write(hashlib.sha256(binary).digest() + binary)
        Path(file.name).replace(path)
    except OSError as error:
        log.warning("compiled kernels are not cached: %s", error)


def _nvrtc() -> Any:
    return importlib.import_module("cuda.bindings.nvrtc")


def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


@functools.cache
def _version() -> tuple[int, int]:
    error, major, minor = _nvrtc().nvrtcVersion()
    if error:
        raise RuntimeError(f"nvrtcVersion: {error}")
    return major, minor


def _compile(source: str, options: Sequence[str]) -> bytes:
    nvrtc = _nvrtc()

    def check(result: tuple[Any, ...]) -> Any:
        if result[0]:
            raise RuntimeError(f"NVRTC: {result[0]}")
        return result[1] if len(result) > 1 else None

    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if error:
            log_text = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
            check(nvrtc.nvrtcGetProgramLog(program, log_text))
            raise RuntimeError(f"NVRTC with {' '.join(options)}:\n{log_text.decode(errors='replace').rstrip(chr(0))}")
        binary = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
        check(nvrtc.nvrtcGetCUBIN(program, binary))
        return bytes(binary)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class Kernel:
    """A compiled kernel, loaded on the current device."""

    def __init__(self, binary: bytes, name: str, shared_bytes: int) -> None:
        """Loads function ``name`` of a cubin; each block gets ``shared_bytes`` of dynamic shared memory."""
        torch.cuda.current_stream().synchronize()  # makes sure that torch's CUDA context exists and is current
        driver = self._driver = _driver()
        self.shared_bytes = shared_bytes
        # The module is never unloaded, since captured CUDA graphs keep pointers to its functions.
        self._module = self._checked(driver.cuModuleLoadData(binary))
        self._function = self._checked(driver.cuModuleGetFunction(self._module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._checked(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))

    @staticmethod
    def _checked(result: tuple[Any, ...]) -> Any:
        if result[0]:
            raise RuntimeError(f"CUDA driver: {result[0]}")
        return result[1] if len(result) > 1 else None

    def launch(
        self, blocks: int, threads: int, arguments: bytes, *, cooperative: bool = False, overlaps: bool = False
    ) -> None:
        """Launches on torch's current stream; ``arguments`` is the kernel's only parameter, a struct.

        With ``cooperative`` all blocks are resident at the same time, or the launch fails. With ``overlaps`` blocks may
        start while the preceding kernel ends (programmatic dependent launch): the kernel must execute
        ``griddepcontrol.wait`` before it reads or writes memory.
        """
        data = ctypes.create_string_buffer(arguments, len(arguments))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(data))
        stream = torch.cuda.current_stream().cuda_stream
        if overlaps:
            config = self._overlapping_config
            config.gridDimX, config.blockDimX, config.hStream = blocks, threads, stream
            self._checked(self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(parameters), 0))
            return
        call = self._driver.cuLaunchCooperativeKernel if cooperative else self._driver.cuLaunchKernel
        more = () if cooperative else (0,)
        self._checked(
            call(
                self._function, blocks, 1, 1, threads, 1, 1, self.shared_bytes, stream, ctypes.addressof(parameters),
                *more,
            )
        )  # fmt: skip

    @functools.cached_property
    def _overlapping_config(self) -> Any:
        """A launch configuration with programmatic dependent launch; blocks, threads and stream are set per launch."""
        driver = self._driver
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX = config.gridDimY = config.gridDimZ = 1
        config.blockDimX = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes, config.numAttrs, config.attrs = self.shared_bytes, 1, [attribute]
        return config
