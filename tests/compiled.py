"""Compiles Triton kernels for Hopper without a GPU and inspects the result."""

import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SHARED_BYTES, SPILLED_BYTES = 227 * 1024, 128
"""Limits for a thread block; spilling a few registers in a loop's prologue is harmless."""


def compiled(
    function: Any, types: dict[str, Any], constants: dict[str, Any], whole: Iterable[str] = (), *, warps: int,
    stages: int = 3, **options: Any,
) -> Any:  # fmt: skip
    """Compile ``function`` for argument ``types``; pointers and arguments in ``whole`` are multiples of 16.

    A NamedTuple argument has a tuple of member types; in ``whole`` a member is called "argument.member".

    ``constants`` may be a launch's own keywords, including ``maxnreg``; NamedTuples are passed as launches pass them.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from colonnade.kernels.triton_constants import constexprs

    constants = {name: constexprs(value) if isinstance(value, tuple) else value for name, value in constants.items()}
    signature = {argument: types.get(argument, "constexpr") for argument in function.arg_names}
    leaves = [leaf for i, (name, kind) in enumerate(signature.items()) for leaf in _leaves(kind, (i,), name)]
    values = {path: constants.get(name) for path, name, kind in leaves if kind == "constexpr"}
    whole = set(whole)
    aligned = [path for path, name, kind in leaves if kind.startswith("*") or {name, name.split(".")[0]} & whole]
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    source = ASTSource(function, signature, values, attributes)
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


def product_types(stored: str, scales: str, sizes: Iterable[str]) -> dict[str, Any]:
    """Argument types of a skinny GEMM in bfloat16, except the number of rows."""
    from colonnade.kernels.linear.triton_skinny_gemm import Weight

    weight = Weight(stored, scales, "*bf16")
    types = dict.fromkeys(("x_ptr", "gain_ptr", "residual_ptr", "y_ptr"), "*bf16")
    return types | {"weight": weight, "up": weight, "eps": "fp32"} | dict.fromkeys(sizes, "i32")


def spilled_bytes(built: Any, folder: Path) -> int:
    """Bytes of registers that each thread spills to memory."""
    return _used(built, "STACK", folder)


def registers(built: Any, folder: Path) -> int:
    """Registers per thread."""
    return _used(built, "REG", folder)


def disassembled(built: Any, folder: Path) -> list[str]:
    """SASS instructions and labels."""
    from triton.backends import nvidia

    image = folder / "kernel.cubin"
    image.write_bytes(built.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "nvdisasm"
    text = subprocess.run([tool, "-c", image], check=True, capture_output=True, text=True).stdout
    return [line.strip() for line in text.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/|\.L_", line)]


def loop_instructions(lines: list[str], what: str, *, inner: bool = False) -> list[str]:
    """Instructions of the longest loop that contains ``what``, or with ``inner`` of the shortest."""
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".L_")}
    best: list[str] = []
    for i, line in enumerate(lines):
        to = re.search(r"BRA.*`\((\.L_\w+)\)", line)
        if to and labels.get(to[1], i) < i:
            body = [line for line in lines[labels[to[1]] : i + 1] if not line.startswith(".L_")]
            better = not best or (len(body) < len(best) if inner else len(body) > len(best))
            if better and any(what in line for line in body):
                best = body
    assert best, f"no loop with {what}"
    return best


def _used(built: Any, what: str, folder: Path) -> int:
    """One number of cuobjdump's resource usage."""
    from triton.backends import nvidia

    image = folder / "kernel.cubin"
    image.write_bytes(built.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", image], check=True, capture_output=True, text=True).stdout
    return int(usage.split(f"{what}:")[1].split(maxsplit=1)[0])
