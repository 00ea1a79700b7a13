"""The folder of an exported package, and the checks before its native code may run.

:data:`DECODE` is a step of one token, compiled by AOTInductor for one kind of processor, and :data:`PREFILL` a pass
over up to ``prefill`` tokens of a prompt. Both take their weights from :data:`WEIGHTS`, which is mapped into memory.
In 8 bits (``pt2e``), weights have oneDNN's packed layout; each program has its own, and :data:`WEIGHTS` is empty.
It also contains :data:`PACKAGE` (a :class:`PackageInfo`), the tokenizer, and a manifest with size and SHA-256 of every
file.
"""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from colonnade.checkpoint import atomic_folder
from colonnade.checkpoint.digest import Digest, digest_of
from colonnade.config import Config, ModelConfig
from colonnade.errors import CheckpointError, ConfigError

if TYPE_CHECKING:  # a package must start fast, and torch.export takes a while to import
    from torch.export import ExportedProgram

PACKAGE, DECODE, PREFILL, WEIGHTS = "package.json", "decode.pt2", "prefill.pt2", "weights.safetensors"
TOKENIZER = "tokenizer"
INSTRUCTION_SETS = ("sse", "ssse", "avx", "amx", "fma", "f16c", "bmi", "gfni", "vaes", "vpcl", "movbe", "adx", "sha_")
"""Beginnings of the names, in Linux's /proc/cpuinfo, of what a compiler may use."""


class Processor(Config):
    """The target that native code was compiled for."""

    machine: str
    """As printed by ``uname -m``: x86_64, aarch64."""
    instructions: tuple[str, ...]
    torch: str
    """The version of torch that compiled it."""

    @staticmethod
    def current() -> "Processor":
        """That of this machine."""
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
        flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
        if platform.machine() == "x86_64":
            flags = [flag for flag in flags if flag.startswith(INSTRUCTION_SETS)]
        version = torch.__version__.partition("+")[0]
        return Processor(machine=platform.machine(), instructions=tuple(sorted(flags)), torch=version)

    def check(self, folder: Path) -> None:
        """Raise :class:`CheckpointError` unless this machine can run the code of the package in ``folder``."""
        here, again = Processor.current(), "export the model again on this machine"
        if here.machine != self.machine:
            raise CheckpointError(f"{folder} was compiled for {self.machine}, and this is {here.machine}; {again}")
        if missing := sorted({*self.instructions} - {*here.instructions}):
            raise CheckpointError(
                f"{folder} was compiled for a processor with {', '.join(missing[:4])}"
                f"{' and others' if len(missing) > 4 else ''}, which this one lacks; {again}"
            )
        if here.torch != self.torch:
            raise CheckpointError(f"{folder} was compiled by torch {self.torch}, and this is {here.torch}; {again}")


class PackageInfo(Config):
    """``package.json``."""

    context: int = Field(gt=1)
    """Tokens of a text, at most."""
    prefill: int = Field(gt=1)
    """Tokens of one pass over a prompt, at most."""
    dtype: str = Field(pattern="float32|bfloat16|float16")
    """Of the weights and the cache."""
    pt2e: Literal["dynamic", "static"] | None = None
    """Whether linear layers have 8 bits, and how the scales of their inputs are chosen."""
    cache_row: tuple[int, int, int]
    """The shape of one slot of a layer's cache (:func:`colonnade.model.static_attend.cache_row`)."""
    model: ModelConfig
    processor: Processor


def compile_program(program: "ExportedProgram", path: Path, *, weights_inside: bool = False) -> None:
    """Compile ``program`` to native code in ``path``, without its weights or, packed for its kernels, with them."""
    from torch._inductor import aoti_compile_and_package  # takes seconds to import

    settings = {
        "aot_inductor.package_constants_in_so": weights_inside,  # otherwise both programs share one file of weights
        "freezing": weights_inside,
        "cpp.dynamic_threads": True,  # otherwise the number of threads of this process is compiled in
    }
    aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings)


def load_program(path: Path) -> Any:
    """The compiled program in ``path``; it needs the constants that ``get_constant_fqns`` names before it runs."""
    # The class behind torch._inductor.aoti_load_package, whose import takes longer than the first token.
    return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)  # type: ignore[attr-defined]


def is_package(path: Path | str) -> bool:
    """Whether ``path`` is a package's folder."""
    return (Path(path) / PACKAGE).is_file()


def check_out(folder: Path, overwrite: bool) -> None:
    """Raise :class:`CheckpointError` if a package must not be written to ``folder``; only packages are overwritten."""
    atomic_folder.refuse_existing(folder, overwrite)
    if folder.exists() and not is_package(folder):
        raise CheckpointError(
            f"{folder} exists and is a model, which a package cannot replace: nothing can be loaded from it again; "
            "choose another name"
        )


def open_package(folder: Path, *, trust: bool, digest: Callable[[Path], Digest] = digest_of) -> PackageInfo:
    """Check everything that can be checked before the code of ``folder`` runs; ``digest`` computes checksums.

    Raises :class:`ConfigError` without ``trust``, and :class:`CheckpointError` for a damaged or modified package and
    for one of another processor or torch.
    """
    if not trust:
        raise ConfigError(
            f"{folder} is a package of native code, which can do anything that you can; run it with --trust only if "
            "you trust its author"
        )
    manifest = atomic_folder.Manifest.read(folder)
    if missing := sorted({DECODE, PREFILL, WEIGHTS, PACKAGE} - {*manifest.files}):
        raise CheckpointError(f"{folder} has no {missing[0]} in its manifest; export the model again")
    manifest.check_sizes(folder)
    manifest.check_contents(folder, manifest.files, digest)
    try:
        info = PackageInfo(**atomic_folder.read_json(folder / PACKAGE))
    except ConfigError as why:
        raise CheckpointError(f"{folder / PACKAGE} is damaged: {why}; export the model again") from None
    info.processor.check(folder)
    return info
