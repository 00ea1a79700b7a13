"""Flash-Decoding in plain torch: runs a plan of :mod:`~colonnade.kernels.attention.split_planner` piece by piece, with
the reference's attention and merge.

What a kernel that follows a plan must compute, in any precision; and the proof that a plan covers every key once:
in float64 the result is that of attention over all keys at once.
"""

import torch
from torch import Tensor

from colonnade.kernels.attention import reference
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import Item, Merge, Plan, Shape
from colonnade.kernels.softmax_state import State, identity, merge_all


def run(
    plan: Plan,
    shape: Shape,
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    cap: float | None = None,
    slopes_N: Tensor | None = None,
    sinks_N: Tensor | None = None,
) -> State:
    """(o_TNH, lse_TN) of the requests in ``table``, of which this is a plan; NaN where it forgot a row."""
    ends, lengths = table.cu_queries.tolist(), table.lengths_R.tolist()
    whole = State(torch.full_like(q_TNH, torch.nan), q_TNH.new_full(q_TNH.shape[:2], torch.nan))
    slots: dict[int, State] = {}

    def heads(head: int) -> slice:
        return slice(head * shape.group, (head + 1) * shape.group)

    def state_of(item: Item) -> State:
        """The state (o, lse) of a block's rows over the keys of one piece."""
        start, new, length = ends[item.request], _new(ends, item), lengths[item.request]
        first = item.block * shape.rows // shape.group
        end = min(new, -(-(item.block + 1) * shape.rows // shape.group))
        q_TGH = q_TNH[start + first : start + end, heads(item.head)]
        key_S = torch.arange(item.first, max(item.first, min(item.end, length)), device=q_TNH.device)
        at = table.pages_RP[item.request, key_S // table.page_tokens], key_S % table.page_tokens, item.head
        state = reference.attend(
            q_TGH, k_PpKH[at][:, None], v_PpKH[at][:, None], window=shape.window, cap=cap,
            slopes_N=None if slopes_N is None else slopes_N[heads(item.head)],
            positions=length - new + end, first=item.first,
        )  # fmt: skip
        skipped = item.block * shape.rows - first * shape.group
        return State(*(x.flatten(0, 1)[skipped : skipped + shape.rows] for x in state))

    def put(line: Item | Merge, state: State) -> None:
        start = ends[line.request]
        row = torch.arange(shape.rows, device=q_TNH.device) + line.block * shape.rows
        row = row[row < _new(ends, line) * shape.group]
        at = start + row // shape.group, line.head * shape.group + row % shape.group
        whole.o[at], whole.lse[at] = state

    for item in plan.pieces:
        if item.slot < 0:
            put(item, state_of(item))
        else:
            slots[item.slot] = state_of(item)
    for merge in plan.merges:
        rows = min(shape.rows, _new(ends, merge) * shape.group - merge.block * shape.rows)
        none = identity(q_TNH.new_empty(rows, q_TNH.shape[2]))
        put(merge, merge_all([none, *(slots[slot] for slot in range(merge.first, merge.end))]))
    return whole if sinks_N is None else reference.with_sinks(whole, sinks_N)


def _new(ends: list[int], line: Item | Merge) -> int:
    return ends[line.request + 1] - ends[line.request]
