"""What kernels are told of the device that they are launched on, and what they send there."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors; Triton's interpreter, on a CPU, has none, and a few show all that can go wrong."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def sent(numbers: Sequence[int], device: torch.device | str, dtype: torch.dtype = torch.int32) -> Tensor:
    """``numbers`` on ``device``, for which the host does not wait."""
    # Pinned, since another copy would wait until the device has done all that it was given before.
    gpu = torch.device(device).type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=gpu).to(device, non_blocking=gpu)
