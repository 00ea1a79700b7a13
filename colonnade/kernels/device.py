"""What kernels are told of the device that they are launched on, and how it gets small lists of numbers."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors; Triton's interpreter, on a CPU, has none, and a few show all that can go wrong."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """``values`` as a tensor on ``device``; on a GPU in the order of its stream, behind what was launched before.

    A plain copy would wait until the device has done all that (``torch.tensor(values, device="cuda")`` does), and the
    engine would never run ahead. The pinned memory is given back when the copy is done: torch keeps an event for it.
    """
    gpu = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=gpu).to(device, non_blocking=gpu)


def upload_into(x: Tensor, values: Sequence[Any]) -> None:
    """Write ``values`` over ``x``, which stays where it is, likewise."""
    x.copy_(torch.tensor(values, dtype=x.dtype, pin_memory=x.is_cuda), non_blocking=True)
