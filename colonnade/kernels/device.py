"""Device properties for kernel launches, and non-blocking uploads of small lists."""

import functools
import math
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of SMs; 4 for Triton's interpreter on a CPU, enough to exercise several workers."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def shared_memory_bytes(device: torch.device) -> float:
    """Shared memory that one thread block may use; unlimited in Triton's interpreter."""
    if device.type != "cuda":
        return math.inf
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # pyrefly: ignore[missing-attribute]


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """``values`` as a tensor on ``device``; on a GPU the copy is queued on the current stream.

    ``torch.tensor(values, device="cuda")`` would wait for all queued work, and the engine could never run ahead. torch
    frees the pinned buffer once the copy has finished.
    """
    gpu = torch.device(device).type == "cuda"
    return _host_tensor(values, dtype, gpu).to(device, non_blocking=gpu)


def upload_into(x: Tensor, values: Sequence[Any] | Tensor) -> None:
    """Copies ``values`` into ``x`` without blocking; a host tensor may be changed right after the call."""
    x.copy_(_host_tensor(values, x.dtype, x.is_cuda), non_blocking=True)


def _host_tensor(values: Sequence[Any] | Tensor, dtype: torch.dtype, pinned: bool) -> Tensor:
    """A host copy of ``values``, which may be nested lists of equal length.

    Integers go through an ``array``, which reads a list in a third of torch's time and is copied at once. Other dtypes
    do not, because torch turns values that are too large into infinity.
    """
    if isinstance(values, Tensor):
        return values.to(dtype).pin_memory() if pinned else values.to(dtype)
    code = {torch.int32: "i", torch.int64: "q"}.get(dtype)
    if code is None or not len(values):
        return torch.tensor(values, dtype=dtype, pin_memory=pinned)
    shape: tuple[int, ...] = (len(values),)
    if isinstance(values[0], Sequence):
        widths = {len(row) for row in values}
        if len(widths) > 1:
            raise ValueError(f"rows of {sorted(widths)} numbers; all rows must have the same length")
        shape, values = (len(values), *widths), list(chain.from_iterable(values))
    flat = array(code, values)
    x = torch.frombuffer(flat, dtype=dtype).view(shape) if flat else torch.empty(shape, dtype=dtype)
    return x.pin_memory() if pinned else x.clone()
