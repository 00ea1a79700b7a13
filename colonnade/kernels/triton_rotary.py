"""The rotary factors of each token in one launch, where plain torch takes a dozen.

Angles are float32 and reach a million radians; sine and cosine are reduced exactly, as torch's are.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.rotary import Rotation


@triton.jit
def _rotation(positions_ptr, theta_ptr, own_ptr, other_ptr, factor, HALF: tl.constexpr, BLOCK: tl.constexpr):
    t, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    angle = tl.load(positions_ptr + t).to(tl.float32) * tl.load(theta_ptr + i, i < HALF, 0.0)
    cos, sin = tl.cos(angle) * factor, tl.sin(angle) * factor
    at = t * (2 * HALF) + i
    tl.store(own_ptr + at, cos, i < HALF)
    tl.store(own_ptr + at + HALF, cos, i < HALF)
    tl.store(other_ptr + at, -sin, i < HALF)
    tl.store(other_ptr + at + HALF, sin, i < HALF)


def rotation(positions_T: Tensor, theta: Tensor, factor: float, dtype: torch.dtype) -> Rotation:
    """The rotary factors of each token (see :func:`rotary.rotation`)."""
    T, half = len(positions_T), len(theta)
    own, other = (torch.empty(T, 1, 2 * half, device=positions_T.device, dtype=dtype) for _ in range(2))
    if T:
        block = triton.next_power_of_2(half)
        _rotation[T,](positions_T.contiguous(), theta, own, other, factor, HALF=half, BLOCK=block, num_warps=1)
    return Rotation(own, other)
