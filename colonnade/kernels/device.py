"""What kernels are told of the device that they are launched on, and how it gets small lists of numbers."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
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
    return _numbers(values, dtype, gpu).to(device, non_blocking=gpu)


def upload_into(x: Tensor, values: Sequence[Any] | np.ndarray) -> None:
    """Write ``values`` over ``x``, which stays where it is, likewise."""
    x.copy_(_numbers(values, x.dtype, x.is_cuda), non_blocking=True)


def _numbers(values: Sequence[Any] | np.ndarray, dtype: torch.dtype, pinned: bool) -> Tensor:
    """A copy of ``values``, lists of lists too, on the host: numpy reads a list in a third of torch's time.

    An ``array`` of the same integers is one copy of its memory. Other numbers are read as Python has them, and rounded
    by torch, which makes infinity of what is too large and does not warn.
    """
    x = torch.from_numpy(np.array(values, dtype=_INTEGERS.get(dtype, np.float64))).to(dtype)
    return x.pin_memory() if pinned else x


_INTEGERS = {torch.int32: np.int32, torch.int64: np.int64}
