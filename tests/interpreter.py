"""A faster Triton interpreter, and a process that runs modules of interpreted kernels in it one by one.

    TRITON_INTERPRET=1 python -m tests.interpreter      reads module names, writes [name, exit code, output] for each

At each launch, and at each call of a function inside a kernel, the interpreter searches triton.language for its
builtins. For each value it builds a table of all types, the name of its type, and constants of its shape. For each
integer sum it computes whether int32 would overflow, and then ignores the answer. For each operation it derives the
type of the result and compares shapes size by size. Here tables, constants and types are computed once, equal shapes
are one object, and the rest is omitted: kernels, which call many small functions, take a quarter of the time. Results
are unchanged.

Each module runs in its own child process, forked after torch and Triton have been imported.
"""

import functools
import inspect
import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

MODULES = ("torch._dynamo", "colonnade.kernels.registry")
ROOT = Path(__file__).parents[1]

CHECKS = {
    "interpreted": 7, "interpreted_experts": 10, "interpreted_decode": 13, "interpreted_cascade": 7,
    "interpreted_latent": 5, "interpreted_fused": 8, "interpreted_tensor_core": 4, "interpreted_quantised": 11,
    "interpreted_ranks": 3, "interpreted_transducer": 2,
}  # fmt: skip
"""The modules of interpreted kernels, and how many checks each has."""


class Interpreter:
    """A process that runs ``modules``, and what else it is asked for, one after the other."""

    def __init__(self, *modules: str) -> None:
        variables = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.interpreter"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | variables,
        )  # fmt: skip
        self.asked: set[str] = set()
        self.results: dict[str, tuple[int, str]] = {}
        for module in modules:
            self._ask(module)

    def _ask(self, module: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"tests.{module}\n")
        self.process.stdin.flush()
        self.asked.add(module)

    def run(self, module: str) -> tuple[int, str]:
        """(exit code or minus the signal, output) of a module."""
        assert self.process.stdout is not None
        if module not in self.asked:
            self._ask(module)
        while module not in self.results:
            name, *result = json.loads(self.process.stdout.readline())
            self.results[name.removeprefix("tests.")] = tuple(result)
        return self.results[module]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


started: Interpreter | None = None
"""Runs all modules since the session began (tests/conftest.py)."""


def cache_lookups() -> None:
    """Cache the interpreter's lookups; needs Triton imported under TRITON_INTERPRET=1."""
    from triton import language as tl
    from triton.language import semantic
    from triton.runtime import interpreter

    found = {
        package: [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    }

    @functools.cache
    def with_semantic(builtin: Any) -> Any:
        """A builtin that computes instead of emitting instructions."""
        function = inspect.unwrap(builtin)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **options)

        return call

    def patch_language(_: Any) -> Any:
        """Patch all language modules once per launch; Triton's own functions use tl.core."""
        scope = interpreter._LangPatchScope()
        for package, names in found.items():
            for name in names:
                scope.set_attr(package, name, with_semantic(getattr(package, name)))
        interpreter._patch_lang_tensor(tl.tensor, scope)
        for language in (tl, tl.core):
            interpreter._patch_lang_core(language, scope)
        return scope

    def call(self: Any, *args: Any, **options: Any) -> Any:
        """Call a function inside a kernel; the launch has already patched the language."""
        return self.rewrite()(*args, **options)

    number = functools.cache(interpreter._get_np_dtype)

    def numpy_type(kind: Any) -> Any:
        """The numpy dtype of a scalar ``kind``; block and pointer types are not hashable."""
        return number(tl.uint64 if kind.scalar.is_ptr() else kind.scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = patch_language, numpy_type
    interpreter.InterpretedFunction.__call__ = call
    cache_shapes()
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


def cache_shapes() -> None:
    """Compute what depends on the shape alone once per shape."""
    from triton import language as tl
    from triton._utils import validate_block_shape
    from triton.language import semantic

    @functools.cache
    def sizes(shape: tuple[int, ...]) -> tuple[Any, int]:
        if not shape:
            raise TypeError("0d block_type is forbidden")
        return tl.tuple(shape), validate_block_shape(shape)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel = sizes(
            tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        )

    @functools.cache
    def constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple(map(tl.constexpr, shape)), tl.constexpr(math.prod(shape))

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = constants(tuple(kind.shape.values) if kind.is_block() else ())

    operations = semantic.TritonSemantic
    broadcast, cast, result_type = operations.broadcast_impl_value, operations.cast, operations.computation_type_impl
    types: dict[Any, Any] = {}

    def broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def cast_unequal(self: Any, value: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        return value if value.dtype is dst_ty else cast(self, value, dst_ty, fp_downcast_rounding)

    def result_type_once(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, division: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, division
        if key not in types:
            types[key] = result_type(self, a, a_is_scalar, b, b_is_scalar, division)
        return types[key]

    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
    operations.broadcast_impl_value, operations.cast = broadcast_unequal, cast_unequal
    operations.computation_type_impl = result_type_once
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")  # pyrefly: ignore[no-access]


def run(module: str) -> tuple[int, str]:
    """(exit code or minus the signal, output) of a module run as a program in a fork of this process."""
    with tempfile.TemporaryFile() as said:
        if not (child := os.fork()):
            code = 1
            try:
                for stream in (1, 2):
                    os.dup2(said.fileno(), stream)
                torch.manual_seed(0)
                runpy.run_module(module, run_name="__main__", alter_sys=True)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return code, said.read().decode(errors="replace")


def main() -> None:
    """Run the modules named on stdin, one per line."""
    import faulthandler
    import importlib

    torch.set_num_threads(1)
    faulthandler.enable()
    for module in MODULES:
        importlib.import_module(module)
    cache_lookups()
    for line in sys.stdin:
        print(json.dumps([line.strip(), *run(line.strip())]), flush=True)


if __name__ == "__main__":
    main()
