"""Memory that the GPUs of one machine read and write in each other (torch's symmetric memory, over NVLink or PCIe)."""

import hashlib
import socket
import warnings
from typing import Any

import torch
from torch import Tensor

from colonnade.parallel.axis import Axis
from colonnade.parallel.collectives import group_of


def shared(axis: Axis, count: int, device: torch.device) -> tuple[Tensor, Any]:
    """``count`` bytes on each rank, zeros, and torch's handle on everybody's; ``axis``' ranks call it together."""
    from torch.distributed import _symmetric_memory as symmetric

    # Older versions of torch want to be asked; newer ones warn that there is no need.
    if ask := getattr(symmetric, "enable_symm_mem_for_group", None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ask(axis.group)
    memory = symmetric.empty(count, dtype=torch.uint8, device=device)
    memory.zero_()
    handle = symmetric.rendezvous(memory, group_of(axis.group))
    handle.barrier(channel=0)  # nobody writes before all are zeros
    return memory, handle


def reachable(axis: Axis, device: torch.device, *, able: bool = True) -> bool:
    """Whether all ranks of ``axis`` are ``able``, and stand on one machine whose GPUs reach each other's memory."""
    host = int.from_bytes(hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest(), "big")
    here = torch.tensor([host, device.index or 0])
    host_R, gpu_R = axis.everyones_(here).T
    able = able and bool((host_R == host_R[0]).all())
    if able:
        gpus = gpu_R.tolist()
        able = all(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b)
    return not axis.max_(torch.tensor([int(not able)])).item()
