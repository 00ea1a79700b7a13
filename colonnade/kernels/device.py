"""What kernels are told of the device that they are launched on."""

import functools

import torch


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors; Triton's interpreter, on a CPU, has none, and a few show all that can go wrong."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
