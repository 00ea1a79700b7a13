"""Attention in plain torch: the specification of every kernel, and the fallback.

    o_i = Σ_j softmax_j(q_i·k_j·H^-½) v_j        over the keys j that query i may see

Queries are the last T of S positions (T = S in training, T < S with a cache), so query i is at position S − T + i.
Causal queries see keys up to their own position; with a window w they see the last w of these, including their own.
Query head n reads key/value head n // (N / K) (grouped-query attention, Ainslie 2023). Differentiable, on any device
and dtype.

A soft cap c (``cap``) maps scores to c·tanh(s / c) (Gemma 2, arXiv 2408.00118); then ``slopes_N`` subtract m_n·(i − j)
(ALiBi: Press et al., arXiv 2108.12409), and ``near_RN`` adds a bias by distance (T5,
:mod:`~colonnade.kernels.attention.cross`). ``sinks_N`` are scores of an extra key that each head always sees and whose
value is 0 (attention sinks: Xiao et al., arXiv 2309.17453): the state (0, sink_n), merged once.

Dropout, in training, drops probabilities after the softmax and scales the rest: the normaliser includes all of them, so
states still merge.

**A sharded cache**: attention over a rank's shard of the keys, and the merge of all ranks' states:

    (o_r, lse_r) = attention of every query to the keys of rank r        o = Σ_r exp(lse_r − lse) o_r

Each request has one new token, which sees all keys that the table lists, those of this rank. A rank without keys has
the identity state. A state travels as one tensor, the log-sum-exp behind the elements of o, in at least float32, since
a state that is rounded before the merge would be rounded twice.

**Split plans and cascades**, executed piece by piece, with states combined by ``merge``. In float64 the result equals
attention over all keys at once, which proves that a plan covers every key once.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.kernels.attention.cache_write import gather_latents, select_rows
from colonnade.kernels.attention.cascade import Cascade
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import Item, Merge, Plan, Shape
from colonnade.kernels.dropout import AttentionDropout
from colonnade.kernels.softmax_state import State, identity, merge, merge_all


def visible(
    T: int,
    S: int,
    *,
    causal: bool,
    window: int | None,
    device: torch.device,
    positions: int | None = None,
    first: int = 0,
) -> Tensor:
    """(T, S) booleans: which of S keys from position ``first`` each of the last T of all positions may see."""
    positions = S if positions is None else positions
    query = torch.arange(positions - T, positions, device=device)[:, None]
    key = torch.arange(first, first + S, device=device)[None, :]
    mask = torch.ones(T, S, dtype=torch.bool, device=device)
    if causal:
        mask &= key <= query
    if window is not None:
        mask &= key > query - window
    return mask


def attend(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    dropout: AttentionDropout | None = None,
    cap: float | None = None,
    slopes_N: Tensor | None = None,
    near_RN: Tensor | None = None,
    positions: int | None = None,
    first: int = 0,
) -> State:
    """The softmax state (o_TNH, lse_TN) of one sequence; a query without visible keys has the identity state.

    The keys may be a part of the sequence, from position ``first`` of ``positions`` in all; queries are the last.
    """
    T, N, H = q_TNH.shape
    S, K, _ = k_SKH.shape
    positions = S if positions is None else positions
    mask_TS = visible(T, S, causal=causal, window=window, device=q_TNH.device, positions=positions, first=first)
    scores_KGTS = torch.einsum("tkgh,skh->kgts", q_TNH.unflatten(1, (K, N // K)), k_SKH) * H**-0.5
    if cap is not None:
        scores_KGTS = cap * torch.tanh(scores_KGTS / cap)
    if slopes_N is not None:
        query_T = torch.arange(positions - T, positions, device=q_TNH.device)
        distance_TS = query_T[:, None] - torch.arange(first, first + S, device=q_TNH.device)
        scores_KGTS = scores_KGTS - slopes_N.to(scores_KGTS.dtype).view(K, -1, 1, 1) * distance_TS
    if near_RN is not None:
        scores_KGTS = scores_KGTS + relative_bias(near_RN, T, S, positions, first).unflatten(0, (K, -1))
    scores_KGTS = scores_KGTS.masked_fill(~mask_TS, -torch.inf)
    row_max = scores_KGTS.detach().amax(-1, keepdim=True) if S else scores_KGTS.new_zeros(K, N // K, T, 1)
    row_max = torch.where(row_max == -torch.inf, 0.0, row_max)
    weight_KGTS = torch.exp(scores_KGTS - row_max)
    row_sum = weight_KGTS.sum(-1, keepdim=True)
    safe_sum = torch.where(row_sum == 0, 1.0, row_sum)
    p_KGTS = weight_KGTS / safe_sum
    if dropout is not None:
        keep_KGTS = dropout.keep_mask(N).unflatten(0, (K, N // K))
        p_KGTS = torch.where(keep_KGTS, p_KGTS * (1 / (1 - dropout.rate)), 0.0)
    o_TNH = torch.einsum("kgts,skh->tkgh", p_KGTS, v_SKH).flatten(1, 2)
    lse = torch.where(row_sum == 0, -torch.inf, torch.log(safe_sum) + row_max)
    return State(o_TNH, lse.squeeze(-1).flatten(0, 1).T)


def relative_bias(near_RN: Tensor, T: int, S: int, positions: int | None = None, first: int = 0) -> Tensor:
    """bias_NTS = near[clamp(j − i)] of the last T of ``positions`` queries and S keys from position ``first``."""
    positions, limit = S if positions is None else positions, len(near_RN) // 2
    query_T = torch.arange(positions - T, positions, device=near_RN.device)
    key_S = torch.arange(first, first + S, device=near_RN.device)
    return near_RN[(key_S - query_T[:, None]).clamp(-limit, limit) + limit].permute(2, 0, 1)


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
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """o_TNH of packed sequences; sequence b is rows ``cu_seqlens[b]:cu_seqlens[b + 1]``."""
    # Equal lengths need no device synchronisation and no graph break in torch.compile.
    ends = range(0, len(q_TNH) + 1, longest) if equal and longest else cu_seqlens.tolist()
    parts = []
    for a, b in itertools.pairwise(ends):
        pairs = None if dropout is None else dropout.select(slice(a, b), slice(a, b))
        parts.append(attend(q_TNH[a:b], k_TKH[a:b], v_TKH[a:b], causal=causal, window=window, dropout=pairs).o)
    return torch.cat(parts) if parts else q_TNH.clone()  # no tokens


def paged(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    window: int | None = None,
    values: int | None = None,
    scales_Pp2: Tensor | None = None,
    cap: float | None = None,
    slopes_N: Tensor | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """o_TNH of requests whose keys, including those of the new tokens, are in the pages that ``table`` lists.

    With ``values`` only the first ``values`` elements of each value, and so of each head's output, are used. With
    ``scales_Pp2`` keys are 8-bit latents and values their first elements
    (:mod:`~colonnade.kernels.attention.cache_write`).
    """
    table.check(len(k_PpKH))
    ends, (_, lengths) = table.cu_queries.tolist(), table.host_lengths
    out_TNH = torch.zeros_like(q_TNH[..., :values])
    for r, length in enumerate(lengths):
        a, b = ends[r], ends[r + 1]
        used = table.pages_RP[r, : -(-length // table.page_tokens)]
        k_SKH, v_SKH = keys_and_values(k_PpKH, v_PpKH, used, length, values, scales_Pp2, q_TNH.dtype)
        state = attend(q_TNH[a:b], k_SKH, v_SKH, window=window, cap=cap, slopes_N=slopes_N)
        out_TNH[a:b] = (state if sinks_N is None else with_sinks(state, sinks_N)).o
    return out_TNH


def keys_and_values(
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    used: Tensor,
    length: int,
    values: int | None,
    scales_Pp2: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """k_SKH and v_SKH of the first ``length`` tokens of the pages ``used``; 8-bit ones are cast to ``dtype``."""
    if scales_Pp2 is None:
        k_SKH, v_SKH = (select_rows(cache, used).flatten(0, 1)[:length] for cache in (k_PpKH, v_PpKH))
        k_SKH, v_SKH = (k_SKH, v_SKH) if k_PpKH.element_size() > 1 else (k_SKH.to(dtype), v_SKH.to(dtype))
        return k_SKH, v_SKH[..., :values]
    assert values is not None, "scales are for latents"
    k_SKH = gather_latents(k_PpKH, scales_Pp2, used, values, dtype).flatten(0, 1)[:length]
    return k_SKH, k_SKH[..., :values]


def with_sinks(state: State, sinks_N: Tensor) -> State:
    """``state`` (o_TNH, lse_TN) merged with a key of score ``sinks_N`` and value 0."""
    return merge(state, State(torch.zeros_like(state.o), sinks_N.to(state.lse).expand_as(state.lse)))


def sharded(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    values: int | None = None,
    scales_Pp2: Tensor | None = None,
) -> State:
    """The state (o_TNH, lse_TN), in at least float32, of one-token requests over the keys that ``table`` lists.

    ``values`` and ``scales_Pp2`` as in :func:`paged`.
    """
    compute_dtype = torch.promote_types(q_TNH.dtype, torch.float32)
    table.check(len(k_PpKH))
    new_R, lengths = table.host_lengths
    states, t = [], 0
    for r, length in enumerate(lengths):
        used = table.pages_RP[r, : -(-length // table.page_tokens)]
        k_SKH, v_SKH = keys_and_values(k_PpKH, v_PpKH, used, length, values, scales_Pp2, compute_dtype)
        states.append(
            attend(
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
        state = attend(
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
    return output if sinks_N is None else with_sinks(output, sinks_N)


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
            attend(
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
    return state if sinks_N is None else with_sinks(state, sinks_N)
