"""Rows of a table in host memory, copied to the device (read) or from it (write), in plain torch."""

from typing import Any

import torch
from torch import Tensor


def copy_rows(host_RD: Tensor, rows_U: Tensor, copy_UD: Tensor, *, write: bool) -> None:
    """``copy_UD`` = the rows ``rows_U`` of ``host_RD``, or, with ``write``, these rows = ``copy_UD``.

    Each row is in ``rows_U`` once; it and ``copy_UD`` are on the device. A kernel of a GPU runs in the current stream
    and needs a ``host_RD`` that :func:`map_memory` mapped; this one waits for the stream.
    """
    if write:
        host_RD.index_copy_(0, rows_U.to(host_RD.device), copy_UD.to(host_RD.device))
    else:
        copy_UD.copy_(host_RD.index_select(0, rows_U.to(host_RD.device)))


def map_memory(x: Tensor) -> str | None:
    """Lock ``x`` in memory, where kernels of every GPU can access it; the reason if that failed.

    Call :func:`unmap_memory` before the memory is freed.
    """
    runtime: Any = torch.cuda.cudart()
    code = runtime.cudaHostRegister(x.data_ptr(), x.numel() * x.element_size(), 1)  # portable
    return None if int(code) == 0 else str(code)


def unmap_memory(address: int, device: torch.device) -> None:
    """Undo :func:`map_memory` of the tensor at ``address`` once the kernels of ``device`` have ended."""
    torch.cuda.synchronize(device)
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)
