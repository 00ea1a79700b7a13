"""Import rules that import-linter cannot check, because it treats torch as one package.

Collectives are used in parallel/ (and DCP's in checkpoint/), DTensor in the storage view and FSDP's master weights, the
environment in the command line and the launcher; nothing unpickles or evaluates what it reads.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "colonnade"

# dotted name (and everything below it) -> the files that may use it
ALLOWED_FILES = {
    "torch.distributed": ("parallel/*", "checkpoint/*"),
    "torch.distributed.tensor": ("checkpoint/dtensor_view.py", "parallel/collectives.py", "parallel/fsdp.py"),
    "torch.distributed.checkpoint": ("checkpoint/*",),
    "os.environ": ("cli/*", "parallel/launch.py", "serve/engine_process.py", "serve/child_process.py"),
    "os.getenv": (),
    "os.putenv": (),
    "pickle": (),
    "marshal": (),
    "shelve": (),
    "torch.load": ("compat/tutel/checkpoint/__init__.py", "speech/face.py"),
    "eval": (),
    "exec": (),
}


# Private interfaces of torch: one file uses those of communication, one the attention operators below autograd, one
# AOTInductor.
# torch._foreach_* is documented.
PRIVATE = (
    "parallel/collectives.py", "parallel/symmetric_memory.py", "kernels/attention/chunk.py",
    "kernels/linear/scaled_mm.py", "kernels/experts/grouped_mm.py", "checkpoint/package_format.py",
    "kernels/attention/shared_prefix.py", "kernels/attention/cudnn_relative.py",
)  # fmt: skip


@functools.cache
def names_used(source: str) -> tuple[tuple[str, int], ...]:
    return tuple(_names_used(source))


def _names_used(source: str) -> Iterator[tuple[str, int]]:
    """Each dotted name that ``source`` imports, or reads through an import, with its line."""
    tree = ast.parse(source)
    bound: dict[str, str] = {name: name for name in ("eval", "exec")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}", node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (dotted := _dotted(node)):
            first, _, rest = dotted.partition(".")
            if first in bound:
                yield f"{bound[first]}.{rest}" if rest else bound[first], node.lineno


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else None
    return None


def violations(source: str, path: str, name: str) -> set[int]:
    """Lines of ``source`` that use ``name`` although ``path`` may not."""
    if any(fnmatch(path, pattern) for pattern in ALLOWED_FILES[name]):
        return set()
    return {line for used, line in names_used(source) if used == name or used.startswith(name + ".")}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ALLOWED_FILES)
def test_restricted_names_are_used_only_where_allowed(name):
    found = {}
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix()
        if lines := violations(file.read_text(), path, name):
            found[path] = sorted(lines)
    assert not found, f"{name} may be used in {ALLOWED_FILES[name] or 'no file'} only"


HEAVY = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.pipelining")
"""Imports of half a second to two seconds each, for plans, checkpoints and compilation that many processes never use.
"""

TRAIN_STEP = """
import torch
from colonnade.config import TrainConfig
from colonnade.train import loop
from colonnade.train.optimizer import AdamW
w = torch.ones(2, 3, requires_grad=True)
w.grad = torch.ones(2, 3)
with loop._deterministic(False):
    AdamW({"w": w}, TrainConfig()).step(0.1)
"""


def modules_after(code: str) -> set[str]:
    """The modules imported in a new process that runs ``code``."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout.split())


@pytest.mark.sample(1)
@pytest.mark.parametrize("code", [TRAIN_STEP, "import colonnade.serve.server", "import colonnade.verify.run"])
def test_heavy_modules_are_imported_only_when_needed(code):
    """Each rank of a run imports what it uses before its first step."""
    assert set(HEAVY) & modules_after(code) == set()


@pytest.mark.slow
def test_the_http_process_does_not_import_torch():
    """It would cost 230 MB and 3 s of CPU time."""
    code = "import colonnade.cli.serving, colonnade.serve.server"
    assert {"torch", "numpy", "colonnade.checkpoint"} & modules_after(code) == set()


def private_names(source: str) -> set[str]:
    names = {name for name, _ in names_used(source) if name.split(".")[0] == "torch"}
    return {
        name
        for name in names
        if any(step.startswith("_") and not step.startswith(("__", "_foreach_")) for step in name.split("."))
    }


def test_torch_private_interfaces_are_used_in_one_file():
    found = {}
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix()
        if path not in PRIVATE and (names := private_names(file.read_text())):
            found[path] = sorted(names)
    assert not found
    assert private_names("import torch\ntorch.ops._c10d_functional.x") == {
        "torch.ops._c10d_functional",
        "torch.ops._c10d_functional.x",
    }


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch.distributed", "torch.distributed"),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed"),
        ("from torch import distributed as dist", "torch.distributed"),
        ("from torch.distributed.tensor import DTensor", "torch.distributed.tensor"),
        ("import torch.distributed as d\nd.tensor.DTensor", "torch.distributed.tensor"),
        ("from os import environ", "os.environ"),
        ("import os\nos.environ.get('X')", "os.environ"),
        ("eval('1')", "eval"),
        ("def f():\n    import pickle", "pickle"),
    ],
)
def test_every_form_of_use_is_detected(source, name):
    assert violations(source, "model/ffn.py", name)


def test_torch_load_reads_weights_only():
    for pattern in ALLOWED_FILES["torch.load"]:
        calls = [node for node in ast.walk(ast.parse((PACKAGE / pattern).read_text())) if isinstance(node, ast.Call)]
        loads = [call for call in calls if _dotted(call.func) == "torch.load"]
        assert loads
        assert all(ast.unparse(call).endswith("weights_only=True)") for call in loads)


def test_method_of_the_same_name_is_not_a_violation():
    assert not violations("model.eval()", "model/ffn.py", "eval")
