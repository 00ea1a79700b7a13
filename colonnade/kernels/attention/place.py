"""From the product of a layer's first projection to queries, and keys and values in a paged cache.

    q, k, v = split(qkv)        q, k ← norm(q), norm(k)        q, k ← rot(q), rot(k)        cache[slots] ← k, v

The specification, in plain torch, and what a CPU uses. Rows of ``qkv_Tz`` are grouped by key/value head: its G query
heads, its key, its value.
"""

from torch import Tensor

from colonnade.kernels.attention import kept
from colonnade.kernels.linear.fused import Scale
from colonnade.kernels.norm import reference as norm_reference
from colonnade.kernels.rotary.reference import Rotation, rotate


def place(
    qkv_Tz: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    slots_T: Tensor,
    *,
    turn: Rotation | None = None,
    norms: tuple[Scale, Scale] | None = None,
) -> Tensor:
    """q_TnH; writes a key and a value for each row into the slots (page · page_tokens + offset)."""
    K, H = k_PpKH.shape[2:]
    qkv_TkgH = qkv_Tz.unflatten(-1, (K, -1, H))
    q_TnH = qkv_TkgH[:, :, :-2].flatten(1, 2)
    k_TkH, v_TkH = qkv_TkgH[:, :, -2], qkv_TkgH[:, :, -1]
    if norms is not None:
        q_TnH, k_TkH = (
            norm_reference.norm(x, norm.weight_D, None, norm.eps) for x, norm in zip((q_TnH, k_TkH), norms, strict=True)
        )
    if turn is not None:
        q_TnH, k_TkH = (rotate(x, turn) for x in (q_TnH, k_TkH))
    for pool, new in ((k_PpKH, k_TkH), (v_PpKH, v_TkH)):
        kept.write(pool, slots_T, new)
    return q_TnH
