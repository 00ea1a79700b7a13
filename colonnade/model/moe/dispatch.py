"""Dispatch: tokens to the ranks of their experts and back, by any degree r of the same stored weights (Tutel).

The ranks that share a layer's experts are ep × sh: ep rank i stores experts i·e … i·e + e − 1, of which sh rank s
stores the s-th share of the hidden units. A step's degree r, 0 or a divisor of sh, says what travels:

    r = 0    weights: every rank gathers all experts; no token leaves its rank
    r ≥ 1    tokens: an expert's rows are dealt out to sh/r groups of r ranks; each rank of a group gathers the hidden
             slice s mod r, from the ranks s ≡ s' (mod r), and the r partial results are summed where the token is
    r = 1    is expert parallelism with sharded weights, r = sh with sharded arithmetic, which gathers no weights

(Tutel, arXiv 2206.03382, section 4.1; here for any ep and sh, gated experts too, without capacity: what is sent is what
was chosen.) Hidden units may be taken in any order, so a strided group gathers just what it needs. A gathered weight is
not kept for the backward pass but gathered again. Sizes are exchanged before the rows: one wait for the device.

The experts of the highest load may be gathered on every rank, whose tokens then stay where they are (shadows;
FasterMoE, PPoPP 2022, section 4.1).

Tokens go in p parts, part i + 1 under way while the experts work on part i; the backward pass does the same, because a
begun exchange is a node of its own in the graph. Nothing hides the first part's way there and the last one's way back,
so these are small: parts grow as 1, 2, 4, 8 from either end (:func:`shares`). The last way back of all, that of the
rows' gradients, has the sums for the weights beside it (:mod:`colonnade.kernels.experts.deferred_wgrad`).
"""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.registry import choose
from colonnade.model.activation_checkpointing import again
from colonnade.model.moe.experts import ExpertDropout, Experts
from colonnade.model.moe.losses import load
from colonnade.model.moe.routing_context import Spread
from colonnade.parallel.axis import Axis, Grid
from colonnade.parallel.hierarchical_all_to_all import Begun, HierarchicalAllToAll, Sizes


def through_experts(
    x_tD: Tensor,
    ids_tA: Tensor,
    weights_tA: Tensor,
    experts: Experts,
    grid: Grid,
    step: Spread,
    rows: int | None = None,
    dropout: ExpertDropout | None = None,
) -> tuple[Tensor, int]:
    """y_tD: each of this rank's tokens through the experts that it chose (E for none), by its weights; and the bytes
    that this rank handed to others for it.

    ``rows`` bounds how many choices are not none; ``dropout`` is of the experts' hidden units. Raises
    :class:`PlanError` for a ``step`` that the grid cannot take.
    """
    step.check(grid.sh.size, experts.count)
    if grid.all.size == 1:
        return _here(x_tD, ids_tA, weights_tA, experts, None, grid, rows, dropout), 0
    if step.degree == 0:
        y_tD = again(_gathered, x_tD, ids_tA, weights_tA, experts, grid, rows, dropout)
        return y_tD, experts.size_bytes * (grid.all.size - 1)
    if not step.shadows:
        return _exchanged(x_tD, ids_tA, weights_tA, experts, grid, step, dropout)
    hot_E, shadow_tA = _hottest(ids_tA, step.shadows, experts.count, grid.all)
    staying_tD = again(_shadowed, x_tD, shadow_tA, weights_tA, experts, grid, hot_E, dropout)
    ids_tA = torch.where(shadow_tA < len(hot_E), experts.count, ids_tA)
    leaving_tD, sent_bytes = _exchanged(x_tD, ids_tA, weights_tA, experts, grid, step, dropout)
    return staying_tD + leaving_tD, sent_bytes + experts.size_bytes * len(hot_E) // experts.count * grid.all.size


def where_all_are(x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor, experts: Experts, grid: Grid) -> tuple[Tensor, int]:
    """The same y_TD where all ranks have all tokens and all choices: what this rank's experts, and its share of their
    hidden units, say to the tokens that chose them, summed over ranks.

    Nothing travels but the sum, and nobody waits for the device: for the few tokens of a decoding step.
    """
    kind, dtype, count = x_TD.device.type, x_TD.dtype, experts.here
    place_TA = ids_TA - grid.ep.rank * count
    mine_TA = (place_TA >= 0) & (place_TA < count) & (ids_TA < experts.count)
    place_TA, biased = place_TA.where(mine_TA, count), grid.sh.rank == 0  # the output's bias is the first slice's
    y_TD = experts.few(x_TD, place_TA, weights_TA, biased=biased)
    if y_TD is None:
        order_R, ends_E = choose("sort_by_expert", kind, dtype)(place_TA, count)
        weights = experts.weights_for(ends_E, len(order_R))
        weights = weights if biased else weights._replace(down_bias_ED=None)
        y_TD = experts(x_TD, order_R, ends_E, weights_TA * mine_TA, weights)
    return grid.all.fan_in(y_TD), y_TD.nbytes


def _here(
    x_tD: Tensor,
    ids_tA: Tensor,
    weights_tA: Tensor,
    experts: Experts,
    weights: Weights | None,
    grid: Grid,
    rows: int | None,
    dropout: ExpertDropout | None,
) -> Tensor:
    """All experts are on this rank: those of ``weights``, or its own."""
    if weights is None and dropout is None and (y_tD := experts.few(x_tD, ids_tA, weights_tA)) is not None:
        return y_tD
    sort = choose("sort_by_expert", x_tD.device.type, x_tD.dtype)
    order_R, ends_E = sort(ids_tA, experts.count if weights is None else len(weights.up_EFD), rows)
    taken = weights or experts.weights_for(ends_E, len(order_R))
    hidden = dropout and dropout.hidden(dropout.tags(order_R), experts.width, grid)
    return experts(x_tD, order_R, ends_E, weights_tA, taken, hidden)


def _gathered(
    x_tD: Tensor,
    ids_tA: Tensor,
    weights_tA: Tensor,
    experts: Experts,
    grid: Grid,
    rows: int | None,
    dropout: ExpertDropout | None,
) -> Tensor:
    """r = 0."""
    return _here(x_tD, ids_tA, weights_tA, experts, experts.gathered(grid.sh, grid.ep), grid, rows, dropout)


def _hottest(ids_tA: Tensor, shadows: int, experts: int, all_ranks: Axis) -> tuple[Tensor, Tensor]:
    """(hot_E, shadow_tA): the experts that most tokens of all ranks chose, the lowest first of equals; and each choice
    as a place among those, or their number for none.
    """
    hot_E = all_ranks.sum_(load(ids_tA, experts)).argsort(descending=True, stable=True)[:shadows]
    place_E = torch.full((experts + 1,), shadows, device=ids_tA.device)
    place_E[hot_E] = torch.arange(shadows, device=ids_tA.device)
    return hot_E, place_E[ids_tA]


def _shadowed(
    x_tD: Tensor,
    shadow_tA: Tensor,
    weights_tA: Tensor,
    experts: Experts,
    grid: Grid,
    hot_E: Tensor,
    dropout: ExpertDropout | None,
) -> Tensor:
    """The choices of shadowed experts, here."""
    weights_tA = weights_tA * (shadow_tA < len(hot_E))
    return _here(x_tD, shadow_tA, weights_tA, experts, experts.shadows(hot_E, grid), grid, None, dropout)


def _exchanged(
    x_tD: Tensor,
    ids_tA: Tensor,
    weights_tA: Tensor,
    experts: Experts,
    grid: Grid,
    step: Spread,
    dropout: ExpertDropout | None,
) -> tuple[Tensor, int]:
    """r ≥ 1."""
    kind, dtype, A = x_tD.device.type, x_tD.dtype, ids_tA.shape[1]
    web = HierarchicalAllToAll(grid.all, grid.near, grid.far)
    parts = _cut(len(x_tD), step.overlap)
    parcels = _address(ids_tA, parts, experts.count, grid, web, step.degree)
    gather, combine = choose("gather_rows", kind, dtype), choose("combine_rows", kind, dtype)
    # Split, not sliced: the gradient of each slice would be as large as x.
    x_parts, weights_parts = x_tD.split(parts), weights_tA.split(parts)

    drops = [None] * len(parts) if dropout is None else dropout.split(parts)

    def send(i: int) -> tuple[Begun, Begun | None]:
        parcel, drop = parcels[i], drops[i]
        rows = web.begin(_copies(gather(x_parts[i], parcel.choice_R, A), parcel.sizes, step.degree), parcel.sizes)
        return rows, drop and web.begin(_copies(drop.tags(parcel.choice_R), parcel.sizes, step.degree), parcel.sizes)

    under_way, back = send(0), []
    # Made here, so that on the way back the rows of each part, of the first one too, leave before weights are summed.
    owing = torch.is_grad_enabled() and dropout is None
    later = experts.later(grid, step.degree, kind, dtype) if owing else None
    for i, parcel in enumerate(parcels):
        (arriving, tags), under_way = under_way, send(i + 1) if i + 1 < len(parcels) else under_way
        x_RD, hidden = web.finish(arriving, parcel.sizes), None
        if dropout is not None and tags is not None:
            tag_R = web.finish(tags, parcel.sizes)[parcel.by_expert_R]
            hidden = dropout.hidden(tag_R, experts.width, grid, step.degree)
        y_RD = experts.slice_of(x_RD, parcel.by_expert_R, parcel.ends_e, grid, step.degree, hidden, later)
        back.append(web.begin_back(y_RD, parcel.sizes))
    out: list[Tensor] = []
    for w_tA, parcel, returning in zip(weights_parts, parcels, back, strict=True):
        y_RD = web.finish_back(returning, parcel.sizes)
        if step.degree > 1:  # the partial results of r ranks, each with its slice of the hidden units
            slices = y_RD.split(parcel.sizes.send)
            groups = (slices[i : i + step.degree] for i in range(0, len(slices), step.degree))
            y_RD = torch.cat([functools.reduce(torch.add, group) for group in groups])
        out.append(combine(y_RD, parcel.choice_R, w_tA))
    sizes = [parcel.sizes for parcel in parcels]
    away = sum(sum(it.send) + sum(it.receive) - 2 * it.send[grid.all.rank] for it in sizes)
    sent_bytes = away * x_tD.shape[1] * x_tD.itemsize + experts.size_bytes * (grid.every(step.degree).size - 1)
    if dropout is not None:
        sent_bytes += sum(sum(it.send) - it.send[grid.all.rank] for it in sizes) * dropout.row_TA.itemsize
    return torch.cat(out), sent_bytes


@dataclass(frozen=True)
class _Parcel:
    """One part of the tokens, addressed."""

    choice_R: Tensor
    """The choices (t·A + j, of this part's tokens), those for each group of ranks together."""
    sizes: Sizes
    by_expert_R: Tensor
    """The rows that come in, by expert."""
    ends_e: Tensor


def shares(parts: int) -> list[int]:
    """The sizes of so many parts, in units of the first and the last: 1, 2, 4, 8, 8, …, 8, 4, 2, 1.

    A part's exchange is hidden by the products of the one before if these take twice as long for as many rows.
    """
    return [1 << min(i, parts - 1 - i, 3) for i in range(parts)]


def _cut(tokens: int, parts: int) -> list[int]:
    ends = [tokens * done // sum(shares(parts)) for done in itertools.accumulate(shares(parts))]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def _address(
    ids_tA: Tensor, parts: list[int], experts: int, grid: Grid, web: HierarchicalAllToAll, degree: int
) -> list[_Parcel]:
    """Who gets which rows, for ``parts`` of so many tokens: one sort (two, where an expert's rows are dealt out), one
    exchange of counts, and one wait for the device, for all parts together.
    """
    ep, sh, device, (t, A) = grid.ep.size, grid.sh.size, ids_tA.device, ids_tA.shape
    groups, local, P = sh // degree, experts // ep, len(parts)
    sort = choose("sort_by_expert", device.type, torch.float32)
    part_t1 = torch.cat([torch.full((n, 1), i, device=device) for i, n in enumerate(parts)])
    to_tA = ids_tA // local
    if groups > 1:
        # An expert's rows go round its groups, beginning with another one on each rank.
        turn_R, _ = sort((part_t1 * experts + ids_tA).where(ids_tA < experts, P * experts), P * experts)
        nth_R = torch.arange(t * A, device=device) + grid.all.rank
        group_R = torch.empty_like(turn_R).index_copy_(0, turn_R, nth_R % groups)
        to_tA = to_tA * groups + group_R.view(t, A)
    boxes = ep * groups * local
    address_tA = (part_t1 * boxes + to_tA * local + ids_tA % local).where(ids_tA < experts, P * boxes)
    order_R, ends = sort(address_tA, P * boxes)
    counts = ends.diff(prepend=ends.new_zeros(1)).view(P, ep * groups, local)
    # Each rank of a group is told the same: (rank, part, expert).
    mine = counts.transpose(0, 1).repeat_interleave(degree, 0)
    theirs, between = web.counts(mine)
    told = [mine.sum(2), theirs.sum(2)] + ([] if between is None else [between.sum(3).flatten(0, 1)])
    sizes = torch.stack(told).tolist()
    received = [sum(row[i] for row in sizes[1]) for i in range(P)]
    by_expert = _by_expert(theirs.transpose(0, 1), sum(received)).split(received)
    ends_pe = theirs.sum(0).cumsum(1)
    parcels: list[_Parcel] = []
    first = begin = 0
    for i in range(P):
        send, receive, *crossing = ([row[i] for row in side] for side in sizes)
        choices = sum(send[::degree])  # a group's ranks get the same
        choice_R = order_R[first : first + choices] - begin * A
        first, begin = first + choices, begin + parts[i]
        where = Sizes(send, receive, *web.between(*crossing))
        parcels.append(_Parcel(choice_R, where, by_expert[i], ends_pe[i]))
    return parcels


def _copies(x_R: Tensor, sizes: Sizes, degree: int) -> Tensor:
    """The rows of each group of ranks, once for each of its ``degree`` ranks; gathered before that, because the way
    back of a gather is for rows that stand in it once.
    """
    if degree == 1:
        return x_R
    return torch.cat([block for block in x_R.split(sizes.send[::degree]) for _ in range(degree)])


def _by_expert(count_pse: Tensor, rows: int) -> Tensor:
    """The ``rows`` that come in from each sender by expert, of one part after another, in the order of the experts: in
    each part block (e, s) begins where (s, e) did. No sort: the blocks' places are sums of counts.
    """
    begin_pse = (count_pse.flatten(1).cumsum(1) - count_pse.flatten(1)).view_as(count_pse)
    count_R = count_pse.transpose(1, 2).flatten()
    shift_R = begin_pse.transpose(1, 2).flatten() - (count_R.cumsum(0) - count_R)
    shifts = shift_R.repeat_interleave(count_R, output_size=rows)
    return shifts + torch.arange(rows, device=count_pse.device)
