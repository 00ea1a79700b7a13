"""Dispatch and combine: move tokens, or weights, so that both are on one rank.

The ranks that share a layer's experts are ep × etp: ep rank i stores experts i·e … i·e + e − 1, and etp rank s of those
stores the s-th share of the hidden units. :class:`DispatchOptions` say for each step how to use them, by a degree r of
0 or a divisor of etp (Tutel, arXiv 2206.03382, section 4.1; here for any ep and etp, gated experts, and no capacity):

    one rank        Local          all experts are here
    decoding        Replicated     all ranks have all tokens: each computes its experts, and the results are summed
    r = 0           AllGather      every rank gathers all weights; no token leaves its rank
    r ≥ 1           AllToAll       tokens travel: an expert's rows go round-robin to etp/r groups of r ranks; each rank
                                   of a group gathers the hidden slice s mod r, from ranks s ≡ s' (mod r), and the
                                   token's rank sums the r partial results
    r ≥ 1, shadows  Shadowed       the most loaded experts are gathered on every rank, and their tokens stay
                                   (FasterMoE, PPoPP 2022, section 4.1); the rest is AllToAll

r = 1 is expert parallelism with sharded weights; r = etp shards the arithmetic and gathers no weights. A strided group
gathers just what it needs, because the order of hidden units does not matter. Gathered weights are not saved for the
backward pass but gathered again. Row counts are exchanged before the rows: one wait for the device.

Tokens of AllToAll travel in p parts: part i + 1 is sent while the experts compute part i, and the same in the backward
pass, because starting an exchange is a separate autograd node. Nothing overlaps with the first part's exchange or with
the last part's way back, so these are small: part sizes grow as 1, 2, 4, 8 from either end (:func:`part_sizes`). The
last exchange of the backward pass overlaps with the weight gradients (:mod:`colonnade.kernels.experts.deferred_wgrad`).
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from colonnade.kernels.registry import choose
from colonnade.model.moe.experts import ExpertDropout, ExpertRows, Experts
from colonnade.model.moe.losses import expert_load
from colonnade.model.moe.routing_context import DispatchOptions
from colonnade.parallel.axis import Axis, ExpertAxes
from colonnade.parallel.hierarchical_all_to_all import ExchangeSizes, HierarchicalAllToAll, PendingRows


class Dispatch(Protocol):
    """How the tokens of one forward pass reach their experts: ``combine(map(experts, send(…)))``."""

    sent_bytes: int
    """Bytes that this rank handed to other ranks in the forward pass; known after ``combine``."""

    def send(self, x_tD: Tensor, ids_tA: Tensor, weights_tA: Tensor, /) -> Iterable[ExpertRows]:
        """This rank's work, produced while it is iterated over.

        Each of the t tokens goes to the experts ``ids_tA`` (E for none) by its weights.
        """
        ...

    def combine(self, outputs: Iterable[Tensor]) -> Tensor:
        """y_tD of the outputs of what ``send`` yielded, taken one by one."""
        ...


def choose_dispatch(
    experts: Experts,
    options: DispatchOptions | None = None,
    replicated: bool = False,
    max_choices: int | None = None,
    dropout: ExpertDropout | None = None,
) -> Dispatch:
    """The dispatch of one forward pass. Raises :class:`PlanError` for ``options`` that the grid does not support.

    ``options`` None: tokens travel and weights do not. ``replicated``: all ranks have all tokens and choices.
    ``max_choices`` bounds how many choices are not empty.
    """
    grid = experts.grid
    options = options or DispatchOptions(adaptive_r=grid.etp.size)
    if replicated and grid.all.size > 1:
        return ReplicatedDispatch(experts)
    options.check(grid.etp.size, experts.count)
    if grid.all.size == 1:
        return LocalDispatch(experts, max_choices, dropout)
    if options.adaptive_r == 0:
        return AllGatherDispatch(experts, max_choices, dropout)
    exchange = AllToAllDispatch(experts, options, dropout)
    return ShadowedDispatch(experts, options.shadows, exchange, dropout) if options.shadows else exchange


def run_experts(
    x_tD: Tensor,
    ids_tA: Tensor,
    weights_tA: Tensor,
    experts: Experts,
    options: DispatchOptions,
) -> Tensor:
    """y_tD of this rank's tokens through the experts ``ids_tA`` of all ranks."""
    dispatch = choose_dispatch(experts, options)
    return dispatch.combine(map(experts, dispatch.send(x_tD, ids_tA, weights_tA)))


@dataclass
class LocalDispatch:
    """All experts are on this rank."""

    experts: Experts
    max_choices: int | None = None
    dropout: ExpertDropout | None = None
    sent_bytes: int = 0

    def send(self, x_tD: Tensor, ids_tA: Tensor, weights_tA: Tensor) -> Iterable[ExpertRows]:
        """All rows at once."""
        return [ExpertRows(x_tD, weights_tA, ids_tA, max_choices=self.max_choices, dropout=self.dropout)]

    def combine(self, outputs: Iterable[Tensor]) -> Tensor:
        """The output itself."""
        (y_tD,) = outputs
        return y_tD


@dataclass
class AllGatherDispatch(LocalDispatch):
    """Every rank gathers all experts for its own tokens (r = 0)."""

    def send(self, x_tD: Tensor, ids_tA: Tensor, weights_tA: Tensor) -> Iterable[ExpertRows]:
        """All rows at once, with all weights."""
        experts, grid = self.experts, self.experts.grid
        self.sent_bytes = experts.size_bytes * (grid.all.size - 1)
        gather = functools.partial(experts.gathered, grid.etp, grid.ep)
        return [rows._replace(gather=gather) for rows in super().send(x_tD, ids_tA, weights_tA)]


@dataclass
class ReplicatedDispatch:
    """All ranks have all tokens: each computes its own experts and hidden units, and the results are summed.

    Only the sum travels, and nothing waits for the device: for the few tokens of a decoding step.
    """

    experts: Experts
    sent_bytes: int = 0

    def send(self, x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Iterable[ExpertRows]:
        """The choices of this rank's experts."""
        grid, count = self.experts.grid, self.experts.local_count
        local_TA = ids_TA - grid.ep.rank * count
        mine_TA = (local_TA >= 0) & (local_TA < count) & (ids_TA < self.experts.count)
        local_TA = local_TA.where(mine_TA, count)
        return [ExpertRows(x_TD, weights_TA, local_TA, mask_TA=mine_TA, output_bias=grid.etp.rank == 0)]

    def combine(self, outputs: Iterable[Tensor]) -> Tensor:
        """The sum over ranks."""
        (y_TD,) = outputs
        self.sent_bytes = y_TD.nbytes
        return self.experts.grid.all.fan_in(y_TD)


@dataclass(frozen=True)
class _Part:
    """The exchange of one part of the tokens."""

    choice_R: Tensor
    """The choices to send (t·A + j, of this part's tokens), ordered by destination group."""
    sizes: ExchangeSizes
    order: tuple[Tensor, Tensor]
    """(order_R, ends_e): the received rows sorted by expert, and each expert's end."""


class AllToAllDispatch:
    """Tokens travel to the ranks of their experts (r ≥ 1), in parts that overlap with the experts' arithmetic."""

    sent_bytes = 0

    def __init__(self, experts: Experts, options: DispatchOptions, dropout: ExpertDropout | None):
        grid = experts.grid
        self.experts, self.grid, self.options, self.dropout = experts, grid, options, dropout
        self.exchange = HierarchicalAllToAll(grid.all, grid.intra_node, grid.inter_node)

    def send(self, x_tD: Tensor, ids_tA: Tensor, weights_tA: Tensor) -> Iterator[ExpertRows]:
        """The received rows part by part; part i + 1 is on its way when part i is yielded."""
        experts, exchange, degree, dropout = self.experts, self.exchange, self.options.adaptive_r, self.dropout
        kind, dtype, A = x_tD.device.type, x_tD.dtype, ids_tA.shape[1]
        tokens = _split_tokens(len(x_tD), self.options.overlap)
        self._parts = parts = _plan_exchange(ids_tA, tokens, experts.count, self.grid, exchange, degree)
        self.sent_bytes = self._count_bytes(x_tD)
        gather = choose("gather_rows", kind, dtype)
        # Split, not sliced: the gradient of each slice would be as large as x.
        x_parts, self._weights = x_tD.split(tokens), weights_tA.split(tokens)
        dropouts = [None] * len(parts) if dropout is None else dropout.split(tokens)

        def begin(i: int) -> tuple[PendingRows, PendingRows | None]:
            part, drop = parts[i], dropouts[i]
            x_RD = _repeat_groups(gather(x_parts[i], part.choice_R, A), part.sizes, degree)
            rows = exchange.begin(x_RD, part.sizes)
            if drop is None:
                return rows, None
            return rows, exchange.begin(_repeat_groups(drop.tags(part.choice_R), part.sizes, degree), part.sizes)

        in_flight = begin(0)
        # Made before any part is received: backward, the row gradients of every part leave before weight gradients
        # are computed.
        deferred = experts.deferred(degree, kind, dtype) if torch.is_grad_enabled() and dropout is None else None
        for i, part in enumerate(parts):
            (arriving, tags), in_flight = in_flight, begin(i + 1) if i + 1 < len(parts) else in_flight
            x_RD, drop = exchange.finish(arriving, part.sizes), None
            if dropout is not None and tags is not None:
                drop = replace(dropout, tag_TA=exchange.finish(tags, part.sizes))
            yield experts.slice_rows(x_RD, part.order, degree, drop, deferred)

    def combine(self, outputs: Iterable[Tensor]) -> Tensor:
        """Send each output back at once, then add up each token's rows by the router's weights."""
        parts, degree, y_parts = self._parts_of(outputs), self.options.adaptive_r, []
        for (part, returning), w_tA in zip(parts, self._weights, strict=True):
            y_RD = self.exchange.finish_return(returning, part.sizes)
            if degree > 1:  # sum the partial results of r ranks, one for each slice of the hidden units
                slices = y_RD.split(part.sizes.send)
                groups = (slices[i : i + degree] for i in range(0, len(slices), degree))
                y_RD = torch.cat([functools.reduce(torch.add, group) for group in groups])
            combine = choose("combine_rows", y_RD.device.type, y_RD.dtype)
            y_parts.append(combine(y_RD, part.choice_R, w_tA))
        return torch.cat(y_parts)

    def _parts_of(self, outputs: Iterable[Tensor]) -> list[tuple[_Part, PendingRows]]:
        """Each part, and its output on the way back; an output is sent before the next one is computed."""
        begun = [self.exchange.begin_return(y_RD, self._parts[i].sizes) for i, y_RD in enumerate(outputs)]
        return list(zip(self._parts, begun, strict=True))

    def _count_bytes(self, x_tD: Tensor) -> int:
        """Rows there and back, dropout tags, and gathered weights."""
        rank, sizes = self.grid.all.rank, [part.sizes for part in self._parts]
        rows = sum(sum(it.send) + sum(it.receive) - 2 * it.send[rank] for it in sizes)
        weights = self.experts.size_bytes * (self.grid.hidden_slice(self.options.adaptive_r).size - 1)
        tags = 0
        if self.dropout is not None:
            tags = sum(sum(it.send) - it.send[rank] for it in sizes) * self.dropout.tag_TA.itemsize
        return rows * x_tD.shape[1] * x_tD.itemsize + weights + tags


@dataclass
class ShadowedDispatch:
    """Every rank gathers the most loaded experts for its own tokens; the other choices travel by ``exchange``."""

    experts: Experts
    shadows: int
    exchange: AllToAllDispatch
    dropout: ExpertDropout | None
    sent_bytes: int = 0

    def send(self, x_tD: Tensor, ids_tA: Tensor, weights_tA: Tensor) -> Iterator[ExpertRows]:
        """The choices of shadowed experts, then those that arrive."""
        experts, grid = self.experts, self.experts.grid
        hot_E, shadow_tA = _hottest(ids_tA, self.shadows, experts.count, grid.all)
        shadowed_tA = shadow_tA < len(hot_E)
        yield ExpertRows(
            x_tD, weights_tA, shadow_tA, mask_TA=shadowed_tA, gather=functools.partial(experts.shadowed, hot_E),
            dropout=self.dropout,
        )  # fmt: skip
        yield from self.exchange.send(x_tD, torch.where(shadowed_tA, experts.count, ids_tA), weights_tA)
        copies_bytes = experts.size_bytes * self.shadows // experts.count * grid.all.size
        self.sent_bytes = self.exchange.sent_bytes + copies_bytes

    def combine(self, outputs: Iterable[Tensor]) -> Tensor:
        """The shadowed experts' output plus the exchanged one."""
        outputs = iter(outputs)
        y_tD = next(outputs)
        return y_tD + self.exchange.combine(outputs)


def _hottest(ids_tA: Tensor, shadows: int, experts: int, all_ranks: Axis) -> tuple[Tensor, Tensor]:
    """(hot_E, shadow_tA): the experts with the highest load over all ranks, the lowest index first of equals; and each
    choice as an index into ``hot_E``, or ``shadows`` for none.
    """
    hot_E = all_ranks.sum_(expert_load(ids_tA, experts)).argsort(descending=True, stable=True)[:shadows]
    index_E = torch.full((experts + 1,), shadows, device=ids_tA.device)
    index_E[hot_E] = torch.arange(shadows, device=ids_tA.device)
    return hot_E, index_E[ids_tA]


def part_sizes(parts: int) -> list[int]:
    """Relative sizes of so many parts: 1, 2, 4, 8, 8, …, 8, 4, 2, 1.

    A part's exchange is hidden if the products of the part before take at least half as long per row.
    """
    return [1 << min(i, parts - 1 - i, 3) for i in range(parts)]


def _split_tokens(tokens: int, parts: int) -> list[int]:
    sizes = part_sizes(parts)
    ends = [tokens * done // sum(sizes) for done in itertools.accumulate(sizes)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def _plan_exchange(
    ids_tA: Tensor, tokens: list[int], experts: int, grid: ExpertAxes, exchange: HierarchicalAllToAll, degree: int
) -> list[_Part]:
    """Which rows go where, for parts of so many ``tokens``.

    All parts together take one sort (two if an expert has several groups of ranks), one exchange of counts, and one
    wait for the device.
    """
    ep, etp, device, (t, A) = grid.ep.size, grid.etp.size, ids_tA.device, ids_tA.shape
    groups, local, P = etp // degree, experts // ep, len(tokens)
    sort = choose("sort_by_expert", device.type, torch.float32)
    part_t1 = torch.cat([torch.full((n, 1), i, device=device) for i, n in enumerate(tokens)])
    group_tA = ids_tA // local
    if groups > 1:
        # An expert's rows go to its groups round-robin, starting with another group on each rank.
        order_R, _ = sort((part_t1 * experts + ids_tA).where(ids_tA < experts, P * experts), P * experts)
        nth_R = torch.arange(t * A, device=device) + grid.all.rank
        group_R = torch.empty_like(order_R).index_copy_(0, order_R, nth_R % groups)
        group_tA = group_tA * groups + group_R.view(t, A)
    bins = ep * groups * local
    bin_tA = (part_t1 * bins + group_tA * local + ids_tA % local).where(ids_tA < experts, P * bins)
    order_R, ends = sort(bin_tA, P * bins)
    counts = ends.diff(prepend=ends.new_zeros(1)).view(P, ep * groups, local)
    # Each rank of a group gets the same rows: (rank, part, expert).
    mine = counts.transpose(0, 1).repeat_interleave(degree, 0)
    theirs, between = exchange.exchange_counts(mine)
    totals = [mine.sum(2), theirs.sum(2)] + ([] if between is None else [between.sum(3).flatten(0, 1)])
    sizes = torch.stack(totals).tolist()
    received = [sum(row[i] for row in sizes[1]) for i in range(P)]
    by_expert = _by_expert(theirs.transpose(0, 1), sum(received)).split(received)
    ends_pe = theirs.sum(0).cumsum(1)
    parts: list[_Part] = []
    first_choice = first_token = 0
    for i in range(P):
        send, receive, *crossing = ([row[i] for row in side] for side in sizes)
        choices = sum(send[::degree])  # all ranks of a group get the same rows
        choice_R = order_R[first_choice : first_choice + choices] - first_token * A
        first_choice, first_token = first_choice + choices, first_token + tokens[i]
        rows = ExchangeSizes(send, receive, *exchange.intermediate_counts(*crossing))
        parts.append(_Part(choice_R, rows, (by_expert[i], ends_pe[i])))
    return parts


def _repeat_groups(x_R: Tensor, sizes: ExchangeSizes, degree: int) -> Tensor:
    """The rows of each group, once for each of its ``adaptive_r`` ranks.

    Rows are gathered first and repeated then: the backward pass of a gather needs each row to occur once.
    """
    if degree == 1:
        return x_R
    return torch.cat([block for block in x_R.split(sizes.send[::degree]) for _ in range(degree)])


def _by_expert(count_pse: Tensor, rows: int) -> Tensor:
    """Order of the ``rows`` received, by part and expert: in a part, block (e, s) starts where (s, e) was received.

    No sort: the blocks' offsets are sums of counts.
    """
    begin_pse = (count_pse.flatten(1).cumsum(1) - count_pse.flatten(1)).view_as(count_pse)
    count_R = count_pse.transpose(1, 2).flatten()
    shift_R = begin_pse.transpose(1, 2).flatten() - (count_R.cumsum(0) - count_R)
    shifts = shift_R.repeat_interleave(count_R, output_size=rows)
    return shifts + torch.arange(rows, device=count_pse.device)
