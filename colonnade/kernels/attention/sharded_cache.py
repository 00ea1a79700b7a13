"""Attention over a rank's shard of the KV cache, and the merge of all ranks' states, in plain torch.

    (o_r, lse_r) = attention of every query to the keys of rank r        o = Σ_r exp(lse_r − lse) o_r

Each request has one new token, which sees all keys that the table lists, those of this rank. A rank without keys has
the identity state. A state travels as one tensor, the log-sum-exp behind the elements of o, in at least float32, since
a state that is rounded before the merge would be rounded twice.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.kernels.attention import reference
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.softmax_state import State, merge_all


def attend(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    values: int | None = None,
    scales_Pp2: Tensor | None = None,
) -> State:
    """The state (o_TNH, lse_TN), in at least float32, of one-token requests over the keys that ``table`` lists.

    ``values`` and ``scales_Pp2`` as in :func:`reference.paged`.
    """
    compute_dtype = torch.promote_types(q_TNH.dtype, torch.float32)
    table.check(len(k_PpKH))
    new_R, lengths = table.host_lengths
    states, t = [], 0
    for r, length in enumerate(lengths):
        used = table.pages_RP[r, : -(-length // table.page_tokens)]
        k_SKH, v_SKH = reference.keys_and_values(k_PpKH, v_PpKH, used, length, values, scales_Pp2, compute_dtype)
        states.append(
            reference.attend(
                q_TNH[t : t + new_R[r]].to(compute_dtype),
                k_SKH.to(compute_dtype),
                v_SKH.to(compute_dtype),
                causal=False,
            )
        )
        t += new_R[r]
    if not states:
        return State(q_TNH[..., :values].to(compute_dtype), q_TNH.new_empty(q_TNH.shape[:2], dtype=compute_dtype))
    return State(torch.cat([state.o for state in states]), torch.cat([state.lse for state in states]))


def pack_state(state: State) -> Tensor:
    """``state`` (o_TNH, lse_TN) as one tensor (T, N, H + 1)."""
    compute_dtype = torch.promote_types(state.o.dtype, torch.float32)
    out = state.o.new_empty((*state.lse.shape, state.o.shape[-1] + 1), dtype=compute_dtype)
    out[..., :-1], out[..., -1] = state.o, state.lse
    return out


def merge_states(each_STNz: Tensor, more: Sequence[State], dtype: torch.dtype) -> Tensor:
    """o_TNH in ``dtype`` of all ranks' packed states and of ``more`` states; bitwise equal on every rank."""
    states = [State(part_TNz[..., :-1], part_TNz[..., -1]) for part_TNz in each_STNz]
    return merge_all([*states, *(State(state.o.to(each_STNz.dtype), state.lse) for state in more)]).o.to(dtype)
