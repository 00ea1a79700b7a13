"""Applies :class:`~colonnade.serve.sample_args.LogitsChanges` to a rank's share of the logits."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.kernels.device import upload
from colonnade.serve.sample_args import LogitsChanges, SampleArgs


def apply_changes(logits_Rv: Tensor, args: Sequence[SampleArgs], first: int) -> Tensor:
    """The logits with the changes of each row, in float32 or float64; ``first`` is the id of their first column.

    Returns ``logits_Rv`` itself if no row is changed.
    """
    rows = [r for r, each in enumerate(args) if each.changes is not None]
    if not rows:
        return logits_Rv
    dtype = torch.float64 if logits_Rv.dtype == torch.float64 else torch.float32
    x_Rv = logits_Rv.to(dtype, copy=True)
    width, device = x_Rv.shape[1], x_Rv.device
    entries = [
        (r, token - first, scale, bias)
        for r in rows
        for token, scale, bias in zip(*_changes(args[r])[:3], strict=True)
        if first <= token < first + width
    ]
    if entries:
        row_E, column_E = upload([entry[:2] for entry in entries], torch.int64, device).T
        scale_E, bias_E = upload([entry[2:] for entry in entries], x_Rv.dtype, device).T
        value_E = x_Rv[row_E, column_E]
        x_Rv[row_E, column_E] = torch.where(value_E > 0, value_E / scale_E, value_E * scale_E) + bias_E
    masked = [r for r in rows if _changes(args[r]).mask is not None]
    if masked:
        ids_v = torch.arange(first, first + width, device=device)
        packed = torch.frombuffer(bytearray(b"".join(_changes(args[r]).mask or b"" for r in masked)), dtype=torch.uint8)
        packed = packed.view(len(masked), -1).to(device)
        allowed_Mv = (packed[:, ids_v >> 3] >> (ids_v & 7).to(torch.uint8)) & 1
        row_M = upload(masked, torch.int64, device)
        x_Rv[row_M] = x_Rv[row_M].masked_fill(allowed_Mv == 0, -math.inf)
    return x_Rv


def _changes(args: SampleArgs) -> LogitsChanges:
    assert args.changes is not None
    return args.changes
