"""Capacity: how many tokens an expert takes, and which (GShard, arXiv 2006.16668; Switch, section 2.2; Tutel).

    n_e = ⌈T/E⌉          f > 0: C = A·int(f·n_e)     f = 0: C = the largest load     f < 0: the smaller of the two

The place of a token's j-th choice is the number of earlier tokens with the same j-th choice, plus all first … (j−1)-th
choices of that expert: every first choice stands before every second one. Places from C on are dropped. Earlier means a
lower number in the step's global batch, or a higher top probability (batch-prioritised, Riquelme 2021, arXiv
2106.05974).

No place reaches the largest load, so who is dropped depends on A·int(|f|·n_e) alone, and f = 0 drops nothing in any
order (Tutel counts before it reorders, and drops). Places are counted over the tokens of all ranks, so that no layout
changes who is dropped; or over each rank's own, as Tutel does, with T the largest rank's.
"""

from typing import NamedTuple

from torch import Tensor

from colonnade.config import MoeConfig
from colonnade.errors import ConfigError
from colonnade.model.moe.global_token_order import global_positions, in_global_order
from colonnade.model.moe.router import Choice
from colonnade.parallel.axis import SOLO, Axis


class Admitted(NamedTuple):
    """The choices that got a place: others have expert E and weight 0."""

    ids_TA: Tensor
    weights_TA: Tensor


def admit(choice: Choice, index_T: Tensor, moe: MoeConfig, over: Axis) -> Admitted:
    """Which choices get a place, by the tokens' numbers ``index_T``; ``over`` are the ranks that have other tokens.

    Raises :class:`ConfigError`, on all ranks alike, for a capacity that leaves no place at all.
    """
    ids_TA, weights_TA = choice.ids_TA, choice.weights_TA
    if not moe.capacity:
        return Admitted(ids_TA, weights_TA)
    alone = moe.capacity_over == "rank"
    top_T = choice.probs_TE.detach().amax(1)
    (all_ids, all_top), where_T = in_global_order(SOLO if alone else over, index_T, ids_TA, top_T)
    tokens = max(over.all_gather_int(len(ids_TA))) if alone else len(all_ids)
    place_TA = global_positions(all_ids, moe.experts)
    if moe.priority:
        order_T = all_top.argsort(descending=True, stable=True)
        place_TA[order_T] = global_positions(all_ids[order_T], moe.experts)
    limit = capacity(abs(moe.capacity), moe.active, tokens, moe.experts)
    if tokens and not limit:
        raise ConfigError(
            f"a capacity of {moe.capacity:g} leaves int({abs(moe.capacity):g}·⌈{tokens}/{moe.experts}⌉) = 0 places in "
            f"every expert for {tokens} tokens; raise it to 1 or more, or turn it off: model.moe.capacity of a run "
            "(train.eval_capacity in validations), --experts.capacity of a model that is loaded"
        )
    kept_TA = (place_TA < limit)[where_T] & (ids_TA < moe.experts)
    return Admitted(ids_TA.where(kept_TA, moe.experts), weights_TA.where(kept_TA, 0))


def capacity(factor: float, active: int, tokens: int, experts: int, largest: int = 0, multiple: int = 1) -> int:
    """C by Tutel's rule, for ``tokens`` tokens (the most that any rank has) of ``active`` choices each.

    ``largest`` is the largest load of any expert on any rank, which a ``factor`` of 0 or less asks for. C is rounded up
    to a ``multiple`` (sh · p: so that it can be cut among the ranks and parts of an exchange), itself rounded up to one
    of 128 where it exceeds 256.
    """
    bound = active * int(abs(factor) * -(-tokens // experts))
    C = bound if factor > 0 else largest if factor == 0 else min(largest, bound)
    if multiple > 256:
        multiple = -(-multiple // 128) * 128
    return -(-C // multiple) * multiple
