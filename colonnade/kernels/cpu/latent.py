"""Latent attention over a paged cache of compressed vectors, through the C++ library (``latent_attention.h``).

    cache[slot] = [norm(c); rot(r)]    q'_n = [W_up,nᵀ q_n; rot(p_n)]    o_n = attend(q'_n)    y_n = W_v,n o_n

This is the absorbed form of :class:`~colonnade.model.attention.LatentAttention`, whose attention is
:func:`~colonnade.kernels.cpu.kernels.paged` with one key head.
"""

import torch
from torch import Tensor

from colonnade.kernels.cpu import calls, kernels
from colonnade.kernels.linear.reference import NormWeights
from colonnade.kernels.rotary import Rotation


def fits(q_Tz: Tensor, up_zR: Tensor, pool_Pp1z: Tensor, rope: int) -> bool:
    """Whether :func:`queries` and :func:`values` support these tensors: one dtype, and a cache that is not 8-bit."""
    same = q_Tz.dtype == up_zR.dtype == pool_Pp1z.dtype and kernels.available(q_Tz.dtype)
    whole = q_Tz.is_contiguous() and up_zR.is_contiguous() and pool_Pp1z.is_contiguous()
    gradient = torch.is_grad_enabled() and (q_Tz.requires_grad or up_zR.requires_grad)
    return same and whole and not gradient and rope % 2 == 0 and pool_Pp1z.device.type == "cpu"


def queries(
    q_Tz: Tensor,
    kv_Tz: Tensor,
    up_zR: Tensor,
    pool_Pp1z: Tensor,
    slots_T: Tensor,
    turn: Rotation,
    norm: NormWeights,
    *,
    plain: int,
    value_width: int,
    factor: float,
) -> Tensor:
    """q_Tnz in the cache's space, times ``factor``; writes each row's compressed vector to its slot.

    ``up_zR`` has, for each head, ``plain`` rows of its keys and ``value_width`` of its values.
    """
    (T, z), dtype, (rows, rank) = q_Tz.shape, q_Tz.dtype, up_zR.shape
    rope = pool_Pp1z.shape[-1] - rank
    kernels.require(min(T, plain, value_width, rank) > 0, f"{T} rows for heads of {plain} + {value_width} of {rank}")
    n = rows // (plain + value_width)
    kernels.require(n > 0 and rows == n * (plain + value_width), f"{rows} rows for heads of {plain} + {value_width}")
    kernels.require(rope > 0 and z == n * (plain + rope), f"queries of {z} for {n} heads of {plain} + {rope}")
    kernels.require(pool_Pp1z.shape[2] == 1, f"a cache of {pool_Pp1z.shape[2]} heads")
    kernels.require(
        kv_Tz.shape == (T, rank + rope) and kv_Tz.dtype == dtype and kv_Tz.is_contiguous(),
        f"compressed vectors {tuple(kv_Tz.shape)} {kv_Tz.dtype} for {T} × {rank + rope} in {dtype}",
    )
    kernels.require(
        slots_T.shape == (T,) and slots_T.dtype == torch.int64 and slots_T.is_contiguous(), "slots as int64"
    )
    for x in turn:
        kernels.require(
            x.numel() == T * rope and x.shape[-1] == rope and x.dtype == dtype and x.is_contiguous(),
            f"rotary factors {tuple(x.shape)} {x.dtype} for {T} × {rope} in {dtype}",
        )
    out_Tnz = q_Tz.new_empty(T, n, rank + rope)
    arguments = calls.LatentQueries(
        q_Tz.data_ptr(), kv_Tz.data_ptr(), turn.own.data_ptr(), turn.other.data_ptr(),
        kernels.norm_of(norm.weight_D, norm.bias_D, norm.eps, rank, dtype), up_zR.data_ptr(), slots_T.data_ptr(),
        pool_Pp1z.data_ptr(), out_Tnz.data_ptr(), T, n, plain, rope, rank, value_width,
        pool_Pp1z.shape[0] * pool_Pp1z.shape[1], calls.DTYPES[dtype], factor,
    )  # fmt: skip
    tensors = (q_Tz, kv_Tz, *turn, norm.weight_D, up_zR, pool_Pp1z, slots_T, out_Tnz)
    calls.run(arguments, *tensors, *(() if norm.bias_D is None else (norm.bias_D,)))
    return out_Tnz


def values(o_TnR: Tensor, up_zR: Tensor, *, plain: int, value_width: int) -> Tensor:
    """y_Tz: the values of each head from its weighted sum of compressed vectors."""
    (T, n, rank), dtype = o_TnR.shape, o_TnR.dtype
    kernels.require(
        up_zR.shape == (n * (plain + value_width), rank) and up_zR.dtype == dtype and up_zR.is_contiguous(),
        f"an up-projection {tuple(up_zR.shape)} {up_zR.dtype} for {n} heads of {rank} in {dtype}",
    )
    kernels.require(min(T, n, rank, value_width) > 0 and o_TnR.is_contiguous(), "empty or strided sums")
    y_Tz = o_TnR.new_empty(T, n * value_width)
    arguments = calls.LatentValues(
        o_TnR.data_ptr(), up_zR.data_ptr(), y_Tz.data_ptr(), T, n, plain, value_width, rank, calls.DTYPES[dtype]
    )
    calls.run(arguments, o_TnR, up_zR, y_Tz)
    return y_Tz
