"""One decision for a whole sequence, or for a task (Kudugunta 2021, arXiv 2110.03742).

    sequence    logits_t = mean of W x over the tokens of t's sequence, on all ranks      then as the softmax router
    task        logits_t = the row of t's task in a learned table                         likewise

The stream says which tokens belong together (:class:`colonnade.model.moe.routing_context.TokenGroups`): by number, so
sequences may be packed or split among ranks, also by ring attention. The sequence router sees later tokens, so it is
for encoders and for scoring; a decoder cannot generate with it. A task's experts can be extracted and served alone.
"""

from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.model.moe.router import RouterInput, RouterOutput, RouterParameter, router
from colonnade.model.moe.routers.softmax import softmax_top_k
from colonnade.model.moe.routing_context import TokenGroups


@router("sequence", biased=True, per_sequence=True)
def sequence(inputs: RouterInput) -> RouterOutput:
    """The A experts of the highest mean score over the sequence's tokens on all ranks."""
    groups, over = _groups(inputs), inputs.token_axis
    count_U1 = over.sum_(groups.sum_by_group(inputs.logits_TE.new_ones(len(inputs.logits_TE), 1))).clamp(min=1)

    def mean(logits_TE: Tensor) -> Tensor:
        # Each rank uses the whole sum for its own tokens, so the gradient is a sum over ranks, too.
        sum_UE = over.fan_out(over.fan_in(groups.sum_by_group(logits_TE)))
        return (sum_UE / count_U1)[groups.group_T]

    logits_TE = mean(inputs.logits_TE)
    clean_TE = logits_TE if inputs.clean_TE is inputs.logits_TE else mean(inputs.clean_TE)
    # The noise of a mean of n tokens is √n times narrower than that of one token.
    sigma_T1 = inputs.moe.router.noise / inputs.moe.experts / count_U1.sqrt()[groups.group_T]
    return softmax_top_k(inputs, logits_TE, clean_TE, sigma_T1)._replace(logits_TE=logits_TE)


@router(
    "task",
    lambda config, moe: {"table": RouterParameter((moe.router.tasks, moe.experts))},
    gate=False,
    biased=True,
    per_token=True,
)
def task(inputs: RouterInput) -> RouterOutput:
    """The A experts of the highest score in the row of the token's task."""
    config, table_UE = inputs.moe.router, inputs.parameters["table"]
    if inputs.token_groups is None and config.task is not None:
        clean_TE = table_UE[config.task].expand(len(inputs.tokens_T), -1)
    else:
        groups = _groups(inputs)
        if groups.count > config.tasks:
            raise ConfigError(
                f"the stream has {groups.count} tasks, but the router has {config.tasks}; raise model.moe.router.tasks"
            )
        clean_TE = table_UE[groups.group_T]
    logits_TE = inputs.noisy(clean_TE)
    return softmax_top_k(inputs, logits_TE, clean_TE)._replace(logits_TE=logits_TE)


def _groups(inputs: RouterInput) -> TokenGroups:
    if inputs.token_groups is None:
        kind = inputs.moe.router.kind
        remedy = "set --experts.task" if kind == "task" else "use another router if that is not known"
        raise ConfigError(
            f"router '{kind}' selects experts once per {kind}, but the stream does not assign its tokens to one; "
            f"set token_groups in its Routing, or {remedy} (in generation, for one)"
        )
    return inputs.token_groups
