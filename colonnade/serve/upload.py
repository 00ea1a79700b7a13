"""Small lists of numbers on their way to the device, for which the host does not wait."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``values`` as a tensor on ``device``; on a GPU in the order of its stream, behind what was launched before.

    A plain copy would wait until the device has done all that (``torch.tensor(values, device="cuda")`` does), and the
    engine would never run ahead. The pinned memory is given back when the copy is done: torch keeps an event for it.
    """
    gpu = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=gpu).to(device, non_blocking=gpu)


def upload_into(x: Tensor, values: Sequence[Any]) -> None:
    """Write ``values`` over ``x``, which stays where it is."""
    x.copy_(torch.tensor(values, dtype=x.dtype, pin_memory=x.is_cuda), non_blocking=True)
