"""A Triton kernel compiled for Hopper, which takes no GPU."""

import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SHARED_BYTES, SPILLED_BYTES = 227 * 1024, 128
"""What blocks of threads may take of a multiprocessor; a few registers, in a loop's prologue, are no harm."""


def compiled(
    function: Any, types: dict[str, Any], constants: dict[str, Any], whole: Iterable[str] = (), *, warps: int,
    stages: int = 3, **options: Any,
) -> Any:  # fmt: skip
    """``function`` with arguments of these types, those of ``whole`` and pointers multiples of 16.

    A NamedTuple has its members' types; in ``whole`` they are called "argument.member".

    ``constants`` may be a launch's own, with what it tells of registers among them; a NamedTuple of them goes in as
    launches pass it.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from colonnade.kernels.triton_constants import constexprs

    constants = {name: constexprs(value) if isinstance(value, tuple) else value for name, value in constants.items()}
    found = {argument: types.get(argument, "constexpr") for argument in function.arg_names}
    leaves = [leaf for i, (name, kind) in enumerate(found.items()) for leaf in _leaves(kind, (i,), name)]
    values = {path: constants.get(name) for path, name, kind in leaves if kind == "constexpr"}
    whole = set(whole)
    aligned = [path for path, name, kind in leaves if kind.startswith("*") or {name, name.split(".")[0]} & whole]
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    source = ASTSource(function, found, values, attributes)
    options |= {"num_warps": warps, "num_stages": stages}
    options |= {"maxnreg": constants["maxnreg"]} if "maxnreg" in constants else {}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _leaves(kind: Any, path: tuple[int, ...], name: str) -> Iterable[tuple[tuple[int, ...], str, str]]:
    """(path, name, type) of an argument, or of each member of a NamedTuple, whose name is "argument.member"."""
    if isinstance(kind, tuple):
        fields: Sequence[str] = getattr(kind, "_fields", [str(i) for i in range(len(kind))])
        for i, (member, inner) in enumerate(zip(fields, kind, strict=True)):
            yield from _leaves(inner, (*path, i), f"{name}.{member}")
    else:
        yield path, name, kind


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
