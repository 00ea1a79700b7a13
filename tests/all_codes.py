"""Matrices with every code of a format, and tolerances for products with them."""

import torch

from colonnade.kernels.linear.quantise import FLOAT8, Kind, Quantised

OUTPUTS = 16


def tolerance(dtype: torch.dtype) -> float:
    """Tolerance of the relative norm against float64."""
    return 4e-3 if dtype == torch.bfloat16 else 6e-4


def matrices_of_all_codes(device: str) -> list[Quantised]:
    """A matrix of each kind with 16 outputs whose columns contain every code: 16 times 16."""
    every = torch.arange(256, dtype=torch.int16).sub(128).to(torch.int8).view(OUTPUTS, 16).repeat(1, 4)
    byte = every.contiguous().to(device)
    ones = torch.ones(OUTPUTS, 1, device=device)
    is_nan = byte.view(FLOAT8).float().isnan()
    float8 = torch.where(is_nan, torch.zeros_like(byte), byte).view(FLOAT8)
    words = torch.randint(-(2**31), 2**31, (OUTPUTS, 8), generator=torch.Generator().manual_seed(0)).int().to(device)
    pairs = torch.tensor([0.5, -3.0], device=device, dtype=torch.bfloat16).expand(OUTPUTS, 1, 2).contiguous()
    inputs = byte.shape[1]
    made: list[tuple[Kind, torch.Tensor, torch.Tensor]] = [
        ("int8", byte, ones), ("float8", float8, ones), ("int4", words, pairs),
    ]  # fmt: skip
    return [Quantised(kind, values, scales, inputs, inputs) for kind, values, scales in made]
