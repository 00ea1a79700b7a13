"""A faster Triton interpreter, and a process that runs modules of interpreted kernels in it one by one.

    TRITON_INTERPRET=1 python -m tests.interpreter            reads module names, writes a line of JSON for each

At each launch, and at each call of a function inside a kernel, the interpreter searches triton.language for its
builtins. For each value it builds a table of all types, the name of its type, and constants of its shape. For each
integer sum it computes whether int32 would overflow, and then ignores the answer. Here the tables and constants are
built once, and the rest not at all: kernels, which call many small functions, take a third of the time. Results are
unchanged.

Each module runs in its own child process, forked after torch and Triton have been imported.
"""

import functools
import inspect
import json
import math
import os
import runpy
import sys
import tempfile
import traceback
from typing import Any

MODULES = ("torch._dynamo", "colonnade.kernels.registry")


def cache_lookups() -> None:
    """Cache the interpreter's lookups; needs Triton imported under TRITON_INTERPRET=1."""
    from triton import language as tl
    from triton.language import semantic
    from triton.runtime import interpreter

    found = {
        package: [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    }

    def patch_language(_: Any) -> Any:
        """Patch all language modules once per launch; Triton's own functions use tl.core."""
        scope = interpreter._LangPatchScope()
        for package, names in found.items():
            for name in names:
                interpreter._patch_attr(package, name, getattr(package, name), interpreter.interpreter_builder, scope)
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

    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")  # pyrefly: ignore[no-access]


def run(module: str) -> tuple[int, str]:
    """(exit code or minus the signal, output) of a module run as a program in a fork of this process."""
    with tempfile.TemporaryFile() as said:
        if not (child := os.fork()):
            code = 1
            try:
                for stream in (1, 2):
                    os.dup2(said.fileno(), stream)
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

    import torch

    torch.set_num_threads(1)
    faulthandler.enable()
    for module in MODULES:
        importlib.import_module(module)
    cache_lookups()
    for line in sys.stdin:
        print(json.dumps(run(line.strip())), flush=True)


if __name__ == "__main__":
    main()
