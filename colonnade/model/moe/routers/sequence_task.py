"""One decision for a whole sequence, or for a task (Kudugunta 2021, arXiv 2110.03742).

    sequence    logits_t = mean of W x over the tokens of t's sequence, wherever they are        then as softmax does
    task        logits_t = the row of t's task in a table of its own                             likewise

The stream says which tokens belong together (:class:`colonnade.model.moe.routing_context.TokenGroups`): by number, so
that sequences may be packed, cut among ranks, or cut by a context ring. A sequence's decision looks ahead, so it is for
encoders and for scoring; a decoder that generates would not know it. A task's experts can be taken out and served
alone.
"""

from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.model.moe.router import RouterInput, RouterOutput, RouterParameter, router
from colonnade.model.moe.routers.softmax import softmax_top_k
from colonnade.model.moe.routing_context import TokenGroups


@router("sequence", biased=True)
def sequence(seen: RouterInput) -> RouterOutput:
    """The A experts of the highest mean score of all the sequence's tokens, those of other ranks too."""
    units = _units(seen)

    count_U1 = seen.over.sum_(units.sum_(seen.logits_TE.new_ones(len(seen.logits_TE), 1))).clamp(min=1)

    def mean(logits_TE: Tensor) -> Tensor:
        # Each rank goes on with the whole sum for its own tokens: its gradient is a sum over the ranks, too.
        sum_UE = seen.over.fan_out(seen.over.fan_in(units.sum_(logits_TE)))
        return (sum_UE / count_U1)[units.group_T]

    logits_TE = mean(seen.logits_TE)
    clean_TE = logits_TE if seen.clean_TE is seen.logits_TE else mean(seen.clean_TE)
    # The mean of n tokens' noise is √n times narrower than one token's.
    sigma_T1 = seen.moe.router.noise / seen.moe.experts / count_U1.sqrt()[units.group_T]
    return softmax_top_k(seen, logits_TE, clean_TE, sigma_T1)._replace(logits_TE=logits_TE)


@router(
    "task", lambda config, moe: {"table": RouterParameter((moe.router.tasks, moe.experts))}, gate=False, biased=True
)
def task(seen: RouterInput) -> RouterOutput:
    """The A experts of the highest score in the row of the token's task."""
    config, table_UE = seen.moe.router, seen.own["table"]
    if seen.units is None and config.task is not None:
        clean_TE = table_UE[config.task].expand(len(seen.tokens_T), -1)
    else:
        units = _units(seen)
        if units.count > config.tasks:
            raise ConfigError(
                f"the stream has {units.count} tasks, and the router {config.tasks}; raise model.moe.router.tasks"
            )
        clean_TE = table_UE[units.group_T]
    logits_TE = seen.noisy(clean_TE)
    return softmax_top_k(seen, logits_TE, clean_TE)._replace(logits_TE=logits_TE)


def _units(seen: RouterInput) -> TokenGroups:
    if seen.units is None:
        kind = seen.moe.router.kind
        remedy = "set --experts.task" if kind == "task" else "use another router where that is not known"
        raise ConfigError(
            f"router '{kind}' decides once for a {kind}, and the stream does not say which tokens are of which; "
            f"give its Routing the units, or {remedy} (in generation, for one)"
        )
    return seen.units
