"""Kernels of a decode step that begin while the one before them ends (programmatic dependent launch, Hopper and later).

A step is some hundreds of short kernels, each of which waits a microsecond for the last block of the one before. One
that is started early takes the multiprocessors that have become free, fetches what does not depend on that kernel (a
product its weights), and waits for its end before it reads what does, or writes anything. Graphs record it so.
"""

import functools

import torch


class Switch:
    """Whether it is done, where it can be."""

    on = False
    """Not measured yet: ``--early`` of benchmarks/decode_model.py and benchmarks/step_profile.py compares."""


def early(device: torch.device) -> bool:
    """Whether kernels on ``device`` are started so."""
    return Switch.on and device.type == "cuda" and _able(device)


@functools.cache
def _able(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
