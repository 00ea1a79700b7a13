"""Attention to the part of the keys that a rank holds, and the merge of what all ranks found, in plain torch.

    (o_r, lse_r) = attention of every query to the keys of rank r        o = Σ_r exp(lse_r − lse) o_r

Requests have one new token each, which sees all keys that the table lists: those held here of its own and of all
positions before it. A rank that holds none has the identity state. States travel as one tensor, the log-sum-exp behind
the numbers of o, in float32 at least: what was rounded before the merge would be rounded twice.
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
    """The state (o_TNH, lse_TN), in at least float32, of requests of one new token each over the keys that ``table``
    lists; ``values`` and ``scales_Pp2`` as :func:`reference.paged`.
    """
    kind = torch.promote_types(q_TNH.dtype, torch.float32)
    table.check(len(k_PpKH))
    new_R, lengths = table.host_lengths
    states, t = [], 0
    for r, length in enumerate(lengths):
        used = table.pages_RP[r, : -(-length // table.page_tokens)]
        k_SKH, v_SKH = reference.keys_and_values(k_PpKH, v_PpKH, used, length, values, scales_Pp2, kind)
        states.append(reference.attend(q_TNH[t : t + new_R[r]].to(kind), k_SKH.to(kind), v_SKH.to(kind), causal=False))
        t += new_R[r]
    if not states:
        return State(q_TNH[..., :values].to(kind), q_TNH.new_empty(q_TNH.shape[:2], dtype=kind))
    return State(torch.cat([state.o for state in states]), torch.cat([state.lse for state in states]))


def pack_state(state: State) -> Tensor:
    """``state`` (o_TNH, lse_TN) as one tensor (T, N, H + 1)."""
    kind = torch.promote_types(state.o.dtype, torch.float32)
    out = state.o.new_empty((*state.lse.shape, state.o.shape[-1] + 1), dtype=kind)
    out[..., :-1], out[..., -1] = state.o, state.lse
    return out


def merge_states(each_STNz: Tensor, more: Sequence[State], dtype: torch.dtype) -> Tensor:
    """o_TNH in ``dtype`` of the states of all ranks, packed, and of ``more``; the same bits on every rank."""
    states = [State(part_TNz[..., :-1], part_TNz[..., -1]) for part_TNz in each_STNz]
    return merge_all([*states, *(State(state.o.to(each_STNz.dtype), state.lse) for state in more)]).o.to(dtype)
