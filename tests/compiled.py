"""A Triton kernel compiled for Hopper, which takes no GPU."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHARED_BYTES, SPILLED_BYTES = 227 * 1024, 128
"""What blocks of threads may take of a multiprocessor; a few registers, in a loop's prologue, are no harm."""


def compiled(
    function: Any, types: dict[str, Any], constants: dict[str, Any], whole: Iterable[str] = (), *, warps: int,
    stages: int = 3, **options: Any,
) -> Any:  # fmt: skip
    """``function`` with arguments of these types, those of ``whole`` and pointers multiples of 16.

    The type of a tuple is a tuple of types, in which "constexpr" is None.

    ``constants`` may be a launch's own, with what it tells of registers among them.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = {argument: types.get(argument, "constexpr") for argument in function.arg_names}
    values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, (argument, kind) in enumerate(found.items()):
        members = [((i,), kind)] if isinstance(kind, str) else [((i, j), k) for j, k in enumerate(kind)]
        for path, member in members:
            if member == "constexpr":
                values[path] = constants.get(argument) if isinstance(kind, str) else None
            elif member.startswith("*") or argument in tuple(whole):
                attributes[path] = [["tt.divisibility", 16]]
    source = ASTSource(function, found, values, attributes)
    options |= {"num_warps": warps, "num_stages": stages}
    options |= {"maxnreg": constants["maxnreg"]} if "maxnreg" in constants else {}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def product_types(stored: str, scales: str, sizes: Iterable[str]) -> dict[str, str]:
    """Types of the arguments of a product of a few rows in bfloat16, but of the number of rows."""
    types = dict.fromkeys(("x_ptr", "gain_ptr", "w_bias_ptr", "u_bias_ptr", "residual_ptr", "y_ptr"), "*bf16") | {
        "eps": "fp32"
    }
    types |= dict.fromkeys(("w_ptr", "u_ptr"), stored) | dict.fromkeys(("w_scale_ptr", "u_scale_ptr"), scales)
    return types | dict.fromkeys(sizes, "i32")


def spilled(built: Any, folder: Path) -> int:
    """Bytes that a thread puts into memory for want of registers."""
    return _used(built, "STACK", folder)


def registers(built: Any, folder: Path) -> int:
    """Of a thread."""
    return _used(built, "REG", folder)


def disassembled(built: Any, folder: Path) -> list[str]:
    """Instructions, and labels of places."""
    from triton.backends import nvidia

    image = folder / "kernel.cubin"
    image.write_bytes(built.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "nvdisasm"
    text = subprocess.run([tool, "-c", image], check=True, capture_output=True, text=True).stdout
    return [line.strip() for line in text.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/|\.L_", line)]


def loop(lines: list[str], what: str, *, inner: bool = False) -> list[str]:
    """The instructions of the longest loop in which ``what`` is found, or of the shortest."""
    places = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".L_")}
    found: list[str] = []
    for i, line in enumerate(lines):
        to = re.search(r"BRA.*`\((\.L_\w+)\)", line)
        if to and places.get(to[1], i) < i:
            body = [line for line in lines[places[to[1]] : i + 1] if not line.startswith(".L_")]
            better = not found or (len(body) < len(found) if inner else len(body) > len(found))
            if better and any(what in line for line in body):
                found = body
    assert found, f"no loop with {what}"
    return found


def _used(built: Any, what: str, folder: Path) -> int:
    """One number of the assembler's account."""
    from triton.backends import nvidia

    image = folder / "kernel.cubin"
    image.write_bytes(built.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", image], check=True, capture_output=True, text=True).stdout
    return int(usage.split(f"{what}:")[1].split(maxsplit=1)[0])
