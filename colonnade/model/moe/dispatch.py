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
begun exchange is a node of its own in the graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.kernels.choose import choose
from colonnade.kernels.experts.reference import Weights
from colonnade.model.moe.dropout import ExpertDropout
from colonnade.model.moe.experts import Experts
from colonnade.model.moe.losses import load
from colonnade.model.moe.routing import Spread
from colonnade.model.recompute import again
from colonnade.parallel.axis import Axis, Grid
from colonnade.parallel.hierarchy import Begun, Sizes, Web


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

    ``rows`` bounds how many choices are not none; ``dropout`` is of the experts' hidden units.
    """
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
    kind, dtype = x_tD.device.type, x_tD.dtype
    count = experts.count if weights is None else len(weights.up_EFD)
    order_R, ends_E = choose("sort_choices", kind, dtype)(ids_tA, count, rows)
    weights = weights or experts.weights_for(ends_E, len(order_R))
    if dropout is None:
        run = choose("routed_experts", kind, dtype)
        return run(x_tD, order_R, ends_E, weights_tA, weights, experts.activation)
    x_RD = choose("gather_rows", kind, dtype)(x_tD, order_R, ids_tA.shape[1])
    y_RD = experts(x_RD, ends_E, weights, dropout.hidden(dropout.tags(order_R), experts.width, grid))
    return choose("combine_rows", kind, dtype)(y_RD, order_R, weights_tA)


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
    parts = [slice(*Axis("part", step.overlap).part(len(x_tD), i)) for i in range(step.overlap)]
    web = Web(grid.all, grid.near, grid.far)
    parcels = _address([ids_tA[part] for part in parts], experts.count, grid, web, step.degree)
    gather = choose("gather_rows", kind, dtype)

    def send(i: int) -> tuple[Begun, Begun | None]:
        parcel = parcels[i]
        rows = web.begin(gather(x_tD[parts[i]], parcel.order_R, A), parcel.sizes)
        tags = dropout and web.begin(dropout.rows(parts[i]).tags(parcel.order_R), parcel.sizes)
        return rows, tags

    under_way, back = send(0), []
    for i, parcel in enumerate(parcels):
        (arriving, tags), under_way = under_way, send(i + 1) if i + 1 < len(parcels) else under_way
        x_RD, hidden = web.finish(arriving, parcel.sizes), None
        if dropout is not None and tags is not None:
            tag_R = web.finish(tags, parcel.sizes)[parcel.by_expert_R]
            hidden = dropout.hidden(tag_R, experts.width, grid, step.degree)
        y_RD = experts.slice_of(x_RD[parcel.by_expert_R], parcel.ends_e, grid, step.degree, hidden)
        y_RD = torch.empty_like(y_RD).index_copy(0, parcel.by_expert_R, y_RD)
        back.append(web.begin_back(y_RD, parcel.sizes))
    out: list[Tensor] = []
    for part, parcel, returning in zip(parts, parcels, back, strict=True):
        y_RD = web.finish_back(returning, parcel.sizes)
        if step.degree > 1:  # the partial results of r ranks, each with its slice of the hidden units
            y_RD = y_RD.new_zeros(parcel.choices, y_RD.shape[1]).index_add(0, parcel.row_R, y_RD)
        out.append(choose("combine_rows", kind, dtype)(y_RD, parcel.choice_R, weights_tA[part]))
    sizes = [parcel.sizes for parcel in parcels]
    away = sum(sum(it.send) + sum(it.receive) - 2 * it.send[grid.all.rank] for it in sizes)
    sent_bytes = away * x_tD.shape[1] * x_tD.itemsize + experts.size_bytes * (grid.every(step.degree).size - 1)
    if dropout is not None:
        sent_bytes += sum(sum(it.send) - it.send[grid.all.rank] for it in sizes) * dropout.row_TA.itemsize
    return torch.cat(out), sent_bytes


@dataclass(frozen=True)
class _Parcel:
    """One part of the tokens, addressed."""

    order_R: Tensor
    """The choice (t·A + j) behind each row that is sent."""
    row_R: Tensor
    """Of each row that is sent, its number among the choices; r rows have the same."""
    choice_R: Tensor
    """The choices that are sent at all, in the order of their numbers."""
    choices: int
    sizes: Sizes
    by_expert_R: Tensor
    """The rows that come in, by expert."""
    ends_e: Tensor


def _address(ids: list[Tensor], experts: int, grid: Grid, web: Web, degree: int) -> list[_Parcel]:
    """Who gets which rows, for every part: one exchange of counts, and one wait, for all of them."""
    ep, sh = grid.ep.size, grid.sh.size
    groups, local, device = sh // degree, experts // grid.ep.size, ids[0].device
    sorted_, counts = [], []
    for ids_tA in ids:
        ids_R = ids_tA.flatten()
        # An expert's rows go round its groups, beginning with another one on each rank.
        nth_R = torch.arange(len(ids_R), device=device) + grid.all.rank
        by_expert_R = ids_R.argsort(stable=True)
        group_R = torch.empty_like(ids_R).index_copy_(0, by_expert_R, nth_R % groups)
        address_R = (ids_R // local * groups + group_R) * local + ids_R % local
        address_R = torch.where(ids_R < experts, address_R, ep * groups * local)
        order_R = address_R.argsort(stable=True)
        wanted = torch.arange(ep * groups * local + 1, device=device)
        begin = torch.searchsorted(address_R[order_R], wanted)
        sorted_.append(order_R)
        counts.append(begin.diff().view(ep * groups, local))
    # Each rank of a group is told the same: (rank, part, expert).
    mine = torch.stack(counts, 1).repeat_interleave(degree, 0)
    theirs, between = web.counts(mine)
    told = [mine.sum(2), theirs.sum(2)] + ([] if between is None else [between.sum(3).flatten(0, 1)])
    sizes = torch.stack(told).tolist()
    parcels: list[_Parcel] = []
    for i, order_R in enumerate(sorted_):
        send, receive, *crossing = ([row[i] for row in side] for side in sizes)
        blocks = send[::degree]  # one of each group
        choices = sum(blocks)
        numbers = torch.arange(choices, device=device)
        row_R = numbers
        if degree > 1:
            row_R = torch.cat([block.repeat(degree) for block in numbers.split(blocks)])
        came_se = theirs[:, i]
        expert_R = torch.arange(local, device=device).repeat(len(came_se))
        expert_R = expert_R.repeat_interleave(came_se.flatten(), output_size=sum(receive))
        parcels.append(
            _Parcel(
                order_R[row_R],
                row_R,
                order_R[:choices],
                choices,
                Sizes(send, receive, *web.between(*crossing)),
                expert_R.argsort(stable=True),
                came_se.sum(0).cumsum(0),
            )
        )
    return parcels
