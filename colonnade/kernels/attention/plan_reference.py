"""Split plans and cascades executed in plain torch: the specification of the kernels that follow them.

Each piece is computed by the reference attention and states are combined by ``merge``. In float64 the result equals
attention over all keys at once, which proves that a plan covers every key once.
"""

import torch
from torch import Tensor

from colonnade.kernels.attention import reference
from colonnade.kernels.attention.cascade import Cascade
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import Item, Merge, Plan, Shape
from colonnade.kernels.softmax_state import State, identity, merge, merge_all


def run_plan(
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
    """(o_TNH, lse_TN) of the requests in ``table``; rows that the plan misses are NaN."""
    ends, lengths = table.cu_queries.tolist(), table.lengths_R.tolist()
    output = State(torch.full_like(q_TNH, torch.nan), q_TNH.new_full(q_TNH.shape[:2], torch.nan))
    slots: dict[int, State] = {}

    def heads(head: int) -> slice:
        return slice(head * shape.group, (head + 1) * shape.group)

    def state_of(item: Item) -> State:
        """The state of a block's rows over the keys of one piece."""
        start, new, length = ends[item.request], _query_count(ends, item), lengths[item.request]
        first = item.block * shape.rows // shape.group
        end = min(new, -(-(item.block + 1) * shape.rows // shape.group))
        q_TGH = q_TNH[start + first : start + end, heads(item.head)]
        key_S = torch.arange(item.first, max(item.first, min(item.end, length)), device=q_TNH.device)
        index = table.pages_RP[item.request, key_S // table.page_tokens], key_S % table.page_tokens, item.head
        state = reference.attend(
            q_TGH, k_PpKH[index][:, None], v_PpKH[index][:, None], window=shape.window, cap=cap,
            slopes_N=None if slopes_N is None else slopes_N[heads(item.head)],
            positions=length - new + end, first=item.first,
        )  # fmt: skip
        skipped = item.block * shape.rows - first * shape.group
        return State(*(x.flatten(0, 1)[skipped : skipped + shape.rows] for x in state))

    def store(line: Item | Merge, state: State) -> None:
        start = ends[line.request]
        row = torch.arange(shape.rows, device=q_TNH.device) + line.block * shape.rows
        row = row[row < _query_count(ends, line) * shape.group]
        index = start + row // shape.group, line.head * shape.group + row % shape.group
        output.o[index], output.lse[index] = state

    for item in plan.pieces:
        if item.slot < 0:
            store(item, state_of(item))
        else:
            slots[item.slot] = state_of(item)
    for line in plan.merges:
        rows = min(shape.rows, _query_count(ends, line) * shape.group - line.block * shape.rows)
        none = identity(q_TNH.new_empty(rows, q_TNH.shape[2]))
        store(line, merge_all([none, *(slots[slot] for slot in range(line.first, line.end))]))
    return output if sinks_N is None else reference.with_sinks(output, sinks_N)


def _query_count(ends: list[int], line: Item | Merge) -> int:
    return ends[line.request + 1] - ends[line.request]


def run_cascade(
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
    """(o_TNH, lse_TN) of the requests in ``table``."""
    score_mods = {"cap": cap, "slopes_N": slopes_N}
    state = run_plan(cascade.own, few, q_TNH, k_PpKH, v_PpKH, table, **score_mods)
    starts, lengths = table.cu_queries.tolist(), table.lengths_R.tolist()
    rows_of_group = [
        [starts[r] + query for r in group.requests for query in range(cascade.queries[r])] for group in cascade.groups
    ]

    def piece(item: Item) -> State:
        """The state of all rows of a group (queries times heads) over one piece of its keys."""
        group = cascade.groups[item.request]
        key_S = torch.arange(item.first, item.end)
        index = table.pages_RP[group.requests[0], key_S // table.page_tokens].long(), key_S % table.page_tokens
        heads = slice(item.head * many.group, (item.head + 1) * many.group)
        parts = [
            reference.attend(
                q_TNH[starts[r] : starts[r + 1], heads], *(x[index][:, [item.head]] for x in (k_PpKH, v_PpKH)), cap=cap,
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
        index = rows[m // many.group], line.head * many.group + m % many.group
        shared = merge_all([slots[slot] for slot in range(line.first, line.end)])
        state.o[index], state.lse[index] = merge(shared, State(state.o[index], state.lse[index]))
    return state if sinks_N is None else reference.with_sinks(state, sinks_N)
