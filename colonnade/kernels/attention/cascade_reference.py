"""A :mod:`cascade` in plain torch: each plan's pieces by the reference's attention, and all of it by ``merge``.

What kernels that follow a cascade must compute; in float64 it is the attention of every request to all its keys.
"""

import torch
from torch import Tensor

from colonnade.kernels.attention import reference, split_reference
from colonnade.kernels.attention.cascade import Cascade
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import Item, Shape
from colonnade.kernels.softmax_state import State, merge, merge_all


def run(
    cascade: Cascade,
    few: Shape,
    many: Shape,
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    cap: float | None = None,
    slopes_N: Tensor | None = None,
    sinks_N: Tensor | None = None,
) -> State:
    """(o_TNH, lse_TN) of the requests in ``table``, of which this is a cascade."""
    bends = {"cap": cap, "slopes_N": slopes_N}
    state = split_reference.run(cascade.own, few, q_TNH, k_PpKH, v_PpKH, table, **bends)
    starts, lengths = table.cu_queries.tolist(), table.lengths_R.tolist()
    rows_of_group = [
        [starts[r] + query for r in group.requests for query in range(cascade.queries[r])] for group in cascade.groups
    ]

    def piece(item: Item) -> State:
        """The state (o, lse) of every query and head of a group over one piece of its keys, in flat rows."""
        group = cascade.groups[item.request]
        key_S = torch.arange(item.first, item.end)
        at = table.pages_RP[group.requests[0], key_S // table.page_tokens].long(), key_S % table.page_tokens
        heads = slice(item.head * many.group, (item.head + 1) * many.group)
        parts = [
            reference.attend(
                q_TNH[starts[r] : starts[r + 1], heads], *(x[at][:, [item.head]] for x in (k_PpKH, v_PpKH)), cap=cap,
                slopes_N=None if slopes_N is None else slopes_N[heads], window=few.window, positions=lengths[r],
                first=item.first,
            )
            for r in group.requests
        ]  # fmt: skip
        return State(*(torch.cat(x).flatten(0, 1) for x in zip(*parts, strict=True)))

    slots: dict[int, State] = {}
    for item in cascade.shared.items:
        rows = slice(item.block * many.rows, (item.block + 1) * many.rows)
        slots[item.slot] = State(*(x[rows] for x in piece(item)))
    for line in cascade.shared.merges:
        rows = torch.tensor(rows_of_group[line.request])
        m = torch.arange(line.block * many.rows, min((line.block + 1) * many.rows, len(rows) * many.group))
        at = rows[m // many.group], line.head * many.group + m % many.group
        theirs = merge_all([slots[slot] for slot in range(line.first, line.end)])
        state.o[at], state.lse[at] = merge(theirs, State(state.o[at], state.lse[at]))
    return state if sinks_N is None else reference.with_sinks(state, sinks_N)
