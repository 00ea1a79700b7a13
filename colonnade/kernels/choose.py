"""One table: which implementation serves an operation on a device and a dtype.

Rows stand in order of preference; the first that fits is taken. ``kernels="reference"`` (``--kernels reference`` on
the command line) forces the plain versions, which is how anyone can tell a kernel's bug from a model's. The contract
test is parametrised over this table, so a new kernel is tested by being listed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from colonnade.kernels.attention import reference, sdpa

Operation = Literal["packed_attention", "paged_attention"]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Row:
    """One implementation of an operation, and where it runs."""

    operation: Operation
    name: str
    run: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = FLOATS


TABLE: tuple[Row, ...] = (
    Row("packed_attention", "sdpa", sdpa.packed),
    Row("packed_attention", "reference", reference.packed),
    Row("paged_attention", "sdpa", sdpa.paged),
    Row("paged_attention", "reference", reference.paged),
)


def choose(operation: Operation, device: str, dtype: torch.dtype, kernels: str = "auto") -> Callable[..., Any]:
    """The implementation for ``device`` ("cpu", "cuda") and ``dtype``; ``kernels`` names one, or is "auto"."""
    for row in TABLE:
        if row.operation == operation and device in row.devices and dtype in row.dtypes:
            if kernels in ("auto", row.name):
                return row.run
    raise LookupError(f"no kernel '{kernels}' for {operation} on {device} in {dtype}")
