"""Attention over ragged sequences in one launch, through torch's variable-length FlashAttention (GPU, 16-bit types).

The lengths stay on the device: nobody waits for them, and a stream of many short documents is one kernel a layer
instead of one a document. Equal sequences are viewed as a batch, for which cuDNN is faster.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from colonnade.kernels.attention import sdpa

if torch.backends.cuda.is_built():
    from torch.nn.attention.varlen import varlen_attn
else:  # the import brings torch's compiler: a second of every process that could not call it
    varlen_attn = None

# Newer torch wants to be told of grouped heads; 2.11 takes them as they are.
GROUPED: dict[str, Any] = {}
if varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters:
    GROUPED = {"enable_gqa": True}


def packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    *,
    longest: int,
    equal: bool,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """o_TNH of sequences laid end to end (see :func:`reference.packed`); ``longest`` may be a bound."""
    # The kernel itself asks for heads in multiples of 8; scaled_dot_product_attention pads others.
    if equal or not len(q_TNH) or q_TNH.shape[2] % 8:
        return sdpa.packed(q_TNH, k_TKH, v_TKH, cu_seqlens, longest=longest, equal=equal, causal=causal, window=window)
    assert varlen_attn is not None, "a torch that was built with CUDA"
    sees = (-1 if window is None else window - 1, 0 if causal else -1)
    o_TNH = varlen_attn(q_TNH, k_TKH, v_TKH, cu_seqlens, cu_seqlens, longest, longest, window_size=sees, **GROUPED)
    assert isinstance(o_TNH, torch.Tensor)
    return o_TNH
