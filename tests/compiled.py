"""A Triton kernel compiled for Hopper, which takes no GPU."""

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHARED_BYTES, SPILLED_BYTES = 227 * 1024, 128
"""What blocks of threads may take of a multiprocessor; a few registers, in a loop's prologue, are no harm."""


def compiled(
    function: Any, types: dict[str, str], constants: dict[str, Any], whole: Iterable[str] = (), *, warps: int,
    stages: int = 3, **options: Any,
) -> Any:  # fmt: skip
    """``function`` with arguments of these types, those of ``whole`` and pointers multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {argument: i for i, argument in enumerate(function.arg_names)}
    found = {argument: types.get(argument, "constexpr") for argument in places}
    values = {(places[argument],): constants.get(argument) for argument in places if found[argument] == "constexpr"}
    aligned = [a for a, kind in found.items() if a in tuple(whole) or kind.startswith("*")]
    attributes = {(places[argument],): [["tt.divisibility", 16]] for argument in aligned}
    source = ASTSource(function, found, values, attributes)
    options = {"num_warps": warps, "num_stages": stages, **options}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def spilled(built: Any, folder: Path) -> int:
    """Bytes that a thread puts into memory for want of registers."""
    return _used(built, "STACK", folder)


def registers(built: Any, folder: Path) -> int:
    """Of a thread."""
    return _used(built, "REG", folder)


def _used(built: Any, what: str, folder: Path) -> int:
    """One number of the assembler's account."""
    from triton.backends import nvidia

    image = folder / "kernel.cubin"
    image.write_bytes(built.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", image], check=True, capture_output=True, text=True).stdout
    return int(usage.split(f"{what}:")[1].split(maxsplit=1)[0])
