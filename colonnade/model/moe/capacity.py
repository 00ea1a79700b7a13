"""Expert capacity: how many tokens an expert takes, and which (GShard, arXiv 2006.16668; Switch, section 2.2; Tutel).

    n_e = ⌈T/E⌉          f > 0: C = A·int(f·n_e)     f = 0: C = the largest load     f < 0: the smaller of the two

With ``capacity_tokens`` C is that number and the queues are those of one sequence (Switch's published models); then
nothing is dropped where the sequences are unknown: decoding runs parts of them.

The position of a token's j-th choice in its expert's queue is the number of earlier tokens with the same j-th choice,
plus all first … (j−1)-th choices of that expert: every first choice comes before every second one. Positions from C on
are dropped. Earlier means a lower index in the step's global batch, or a higher top probability (batch-prioritised
routing, Riquelme 2021, arXiv 2106.05974).

No position reaches the largest load, so which tokens are dropped depends on A·int(|f|·n_e) alone, and f = 0 drops
nothing in any order (Tutel counts before it reorders, and drops). Positions are counted over the tokens of all ranks,
so that no layout changes which tokens are dropped; or over each rank's own, as Tutel does, with T the largest rank's.

Ranks hold different tokens, depending on the layout. A decision about all of them gathers what it needs, in the order
of the tokens' global indices (:func:`in_global_order`), so that every rank makes the same decision as a single process.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.config import MoeConfig
from colonnade.errors import ConfigError
from colonnade.kernels.registry import choose
from colonnade.model.moe.router import RouterOutput
from colonnade.model.moe.routing_context import TokenGroups
from colonnade.parallel.axis import SOLO, Axis


class KeptChoices(NamedTuple):
    """The choices within the capacity: dropped ones have expert E and weight 0."""

    ids_TA: Tensor
    weights_TA: Tensor


def apply_capacity(
    choice: RouterOutput, index_T: Tensor, moe: MoeConfig, over: Axis, sequences: TokenGroups | None = None
) -> KeptChoices:
    """Drop choices beyond the capacity, by the tokens' global indices; the ranks ``over`` have other tokens.

    Raises :class:`ConfigError`, on every rank, for a capacity of 0 tokens.
    """
    ids_TA, weights_TA = choice.ids_TA, choice.weights_TA
    if moe.capacity_tokens is not None and sequences is not None:
        E = moe.experts  # choices of none have queues of their own
        queue_TA = torch.add(ids_TA, sequences.group_T[:, None], alpha=E + 1)
        if over.size == 1:  # a sequence's tokens are in order
            position_TA = global_positions(queue_TA, sequences.count * (E + 1))
        else:
            (all_queues,), row_T = in_global_order(over, index_T, queue_TA)
            position_TA = global_positions(all_queues, sequences.count * (E + 1))[row_T]
        kept_TA = position_TA < moe.capacity_tokens
        return KeptChoices(ids_TA.where(kept_TA, E), weights_TA.where(kept_TA, 0))
    if not moe.capacity:
        return KeptChoices(ids_TA, weights_TA)
    per_rank = moe.capacity_over == "rank"
    top_T = choice.probs_TE.detach().amax(1)
    (all_ids, all_top), row_T = in_global_order(SOLO if per_rank else over, index_T, ids_TA, top_T)
    tokens = max(over.all_gather_int(len(ids_TA))) if per_rank else len(all_ids)
    position_TA = global_positions(all_ids, moe.experts)
    if moe.priority:
        order_T = all_top.argsort(descending=True, stable=True)
        position_TA[order_T] = global_positions(all_ids[order_T], moe.experts)
    limit = capacity(abs(moe.capacity), moe.active, tokens, moe.experts)
    if tokens and not limit:
        raise ConfigError(
            f"a capacity of {moe.capacity:g} leaves int({abs(moe.capacity):g}·⌈{tokens}/{moe.experts}⌉) = 0 slots in "
            f"every expert for {tokens} tokens; raise it to 1 or more, or turn it off: model.moe.capacity of a run "
            "(train.eval_capacity in validations), --experts.capacity of a model that is loaded"
        )
    kept_TA = (position_TA < limit)[row_T] & (ids_TA < moe.experts)
    return KeptChoices(ids_TA.where(kept_TA, moe.experts), weights_TA.where(kept_TA, 0))


def capacity(factor: float, active: int, tokens: int, experts: int, largest: int = 0, multiple: int = 1) -> int:
    """C by Tutel's rule, for ``tokens`` tokens (the most of any rank) with ``active`` choices each.

    ``largest`` is the largest load of any expert on any rank, used by a ``factor`` of 0 or less. C is rounded up to a
    ``multiple`` (etp · p, so that ranks and parts of an exchange get equal shares), itself rounded up to one of 128
    where it exceeds 256.
    """
    bound = active * int(abs(factor) * -(-tokens // experts))
    C = bound if factor > 0 else largest if factor == 0 else min(largest, bound)
    if multiple > 256:
        multiple = -(-multiple // 128) * 128
    return -(-C // multiple) * multiple


def in_global_order(over: Axis, index_T: Tensor, *columns: Tensor) -> tuple[list[Tensor], Tensor]:
    """(columns, row_T): the rows of all ranks ordered by global index, and the row of each of this rank's tokens.

    Without a gradient. Ranks exchange their token counts over the host.
    """
    counts = over.all_gather_int(len(index_T))
    order_T = over.all_gather_uneven_(index_T, counts).argsort(stable=True)
    row_T = torch.empty_like(order_T)
    row_T[order_T] = torch.arange(len(order_T), device=order_T.device)
    start = sum(counts[: over.rank])
    return [over.all_gather_uneven_(column, counts)[order_T] for column in columns], row_T[start : start + len(index_T)]


def global_positions(ids_TA: Tensor, experts: int) -> Tensor:
    """position_TA: each choice's position among those of its expert, all first choices before all second ones."""
    return choose("queue_positions", ids_TA.device.type, ids_TA.dtype)(ids_TA, experts)
