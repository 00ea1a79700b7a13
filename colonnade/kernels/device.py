"""What kernels are told of the device that they are launched on, and how it gets small lists of numbers."""

import functools
import math
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors; Triton's interpreter, on a CPU, has none, and a few show all that can go wrong."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def shared_bytes(device: torch.device) -> float:
    """Of a multiprocessor's fast memory, what one program may take; Triton's interpreter has no such limit."""
    if device.type != "cuda":
        return math.inf
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """``values`` as a tensor on ``device``; on a GPU in the order of its stream, behind what was launched before.

    A plain copy would wait until the device has done all that (``torch.tensor(values, device="cuda")`` does), and the
    engine would never run ahead. The pinned memory is given back when the copy is done: torch keeps an event for it.
    """
    gpu = torch.device(device).type == "cuda"
    return _numbers(values, dtype, gpu).to(device, non_blocking=gpu)


def upload_into(x: Tensor, values: Sequence[Any] | Tensor) -> None:
    """Write ``values``, which may be a tensor of the host that is changed soon after, over ``x``, likewise."""
    x.copy_(_numbers(values, x.dtype, x.is_cuda), non_blocking=True)


def _numbers(values: Sequence[Any] | Tensor, dtype: torch.dtype, pinned: bool) -> Tensor:
    """A copy of ``values``, lists of equally long lists too, on the host.

    Integers go through an ``array``, which reads a list in a third of torch's time, and which is read by one copy of
    its memory; not so other numbers, of which torch makes infinity where they are too large.
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
            raise ValueError(f"rows of {sorted(widths)} numbers; give each as many")
        shape, values = (len(values), *widths), list(chain.from_iterable(values))
    flat = array(code, values)
    x = torch.frombuffer(flat, dtype=dtype).view(shape) if flat else torch.empty(shape, dtype=dtype)
    return x.pin_memory() if pinned else x.clone()
