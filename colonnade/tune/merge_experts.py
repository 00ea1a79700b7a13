"""Expert merging: groups each layer's experts by similarity and averages each group (M-SMoE, arXiv 2310.01334).

    the N most used experts lead a group; every other joins the leader with the most similar router scores
    W = Σ_e load_e · P_e W_e / Σ_e load_e            P_e: the order of e's hidden units that fits its leader best

The router keeps its scores for all E experts, and a choice of an expert is mapped to its group. So experts that differ
only in the order of their hidden units are merged without changing the function, for any router. Scores are compared by
the cosine of their columns over some text (section 3.1). Hidden units are matched by the inner product of their
weights, with an auction (Bertsekas, 1988) instead of the Hungarian method, so that it runs as tensor operations.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError, ConfigError, DataError, PlanError
from colonnade.model import Transformer
from colonnade.model.moe import MixtureOfExperts, Router
from colonnade.model.weight_memory import WeightMemory
from colonnade.tune.prune_experts import check_transformer, route

AUCTION_STEP = 1e-2
"""The minimum raise of a bid, relative to the largest inner product: a match is at most this much worse per unit. With
a tenth of it, random matrices of 576 units match 0.1% better in five times the time."""


def check_merge(config: ModelConfig, merge: int) -> None:
    """Raise :class:`ConfigError` unless the experts of a layer can be merged into ``merge``."""
    moe = config.moe
    if moe is None:
        raise ConfigError("this model has no experts to merge")
    if moe.merged:
        raise ConfigError(
            f"the {moe.experts} experts are already merged into {moe.merged}; merge those of the original model"
        )
    if not 1 <= merge < moe.experts:
        raise ConfigError(f"{moe.experts} experts cannot be merged into {merge}; use 1 to {moe.experts - 1}")


@torch.no_grad()
def merge_experts(model: Transformer, texts: Iterable[Tensor], merge: int) -> Transformer:
    """A new model with each layer's experts merged into ``merge``, weighted by their use on ``texts``, int64 tokens
    (T,).

    ``model`` is whole, on one process, and not quantised. Raises :class:`ConfigError` as :func:`check_merge`,
    :class:`PlanError` for a sharded model, :class:`DataError` without text, :class:`CheckpointError` for weights that
    are not finite.
    """
    check_transformer(model)
    check_merge(model.config, merge)
    if (ranks := model.axes.experts.tokens.size) > 1:
        raise PlanError(
            f"merging needs the whole model in one process, not sharded over {ranks}; load it without a plan"
        )
    layers = {
        int(name.split(".")[1]): module
        for name, module in model.named_modules()
        if isinstance(module, MixtureOfExperts)
    }
    if any(module.experts.quantised for module in layers.values()):
        raise ConfigError("quantised experts cannot be merged; load the model with weights='dense'")
    use = _measure(model, layers, texts)
    moe = model.config.moe
    assert moe is not None
    config = model.config.replace(moe=moe.replace(merged=merge))
    sample = next(model.parameters())
    WeightMemory(config, sample.dtype, sample.device).check(f"the model with {merge} experts")
    new = Transformer(config, device=sample.device, dtype=sample.dtype)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in (*new.named_parameters(), *new.named_buffers()):
        if name in tensors and tensors[name].shape == tensor.shape:
            tensor.copy_(tensors[name])
    for layer, module in layers.items():
        leaders_N, group_E = group_experts(use[layer].load_E, use[layer].gram_EE, merge)
        merged = new.blocks.get_submodule(str(layer)).get_submodule("ffn")
        assert isinstance(merged, MixtureOfExperts)
        assert merged.group_E is not None
        merged.group_E.copy_(group_E)
        stacks = dict(module.experts.named_parameters(recurse=False))
        averaged = _averaged(stacks, leaders_N, group_E, use[layer].load_E)
        for name, parameter in merged.experts.named_parameters(recurse=False):
            parameter.copy_(averaged[name])
    return new


@dataclass
class _RouterStatistics:
    """Statistics of one layer's router: choices by expert, and Σ_t s_te s_te' of its scores."""

    load_E: Tensor
    gram_EE: Tensor


def _measure(
    model: Transformer, layers: dict[int, MixtureOfExperts], texts: Iterable[Tensor]
) -> dict[int, _RouterStatistics]:
    config, device = model.config, next(model.parameters()).device
    assert config.moe is not None
    zeros = torch.zeros(config.moe.experts, dtype=torch.float64, device=device)
    use = {layer: _RouterStatistics(zeros.clone(), torch.outer(zeros, zeros)) for layer in layers}

    def hook(layer: int):
        def record(_module: nn.Module, _arguments: object, output: tuple) -> None:
            choice, logits_TE = output
            scores_TE = (choice.probs_TE if logits_TE is None else logits_TE).double()
            ids_C = choice.ids_TA[choice.ids_TA < len(zeros)]
            use[layer].load_E += torch.bincount(ids_C, minlength=len(zeros))
            use[layer].gram_EE += scores_TE.T @ scores_TE

        return record

    routers: list[tuple[int, Router]] = [(layer, module.router) for layer, module in layers.items()]
    handles = [module.register_forward_hook(hook(layer)) for layer, module in routers]
    try:
        for text in texts:
            route(model, text)
    finally:
        for handle in handles:
            handle.remove()
    if not any(bool(each.load_E.any()) for each in use.values()):
        raise DataError("there was no text to measure the experts' use on; pass some text of the task")
    return use


def group_experts(load_E: Tensor, gram_EE: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(leaders_N in the order of their numbers, group_E int64: the group of each expert)."""
    leaders_N = load_E.argsort(descending=True, stable=True)[:groups].sort().values
    norm_E = gram_EE.diagonal().clamp(min=1e-30).sqrt()
    group_E = (gram_EE / torch.outer(norm_E, norm_E))[:, leaders_N].argmax(1)
    group_E[leaders_N] = torch.arange(groups, device=group_E.device)
    return leaders_N, group_E


def _averaged(stacks: Mapping[str, Tensor], leaders_N: Tensor, group_E: Tensor, load_E: Tensor) -> dict[str, Tensor]:
    """The stacks of the merged experts: hidden units aligned with the leaders', averaged by use."""
    hidden = [name for name in ("up", "gate", "down") if name in stacks]
    found = {name: torch.zeros_like(stack[: len(leaders_N)]) for name, stack in stacks.items()}
    for n, leader in enumerate(leaders_N.tolist()):
        members = (group_E == n).nonzero().flatten()
        share = load_E[members]
        share = share / share.sum() if share.any() else torch.full_like(share, 1 / len(members))
        for e, weight in zip(members.tolist(), share.tolist(), strict=True):
            order_F = None
            if e != leader:
                likeness = [stacks[name][leader].float() @ stacks[name][e].float().T for name in hidden]
                order_F = match(torch.stack(likeness).sum(0).cpu()).to(group_E.device)  # rounds of small steps
            for name, stack in stacks.items():
                value = stack[e]
                if order_F is not None and name != "down_bias":
                    value = value[order_F]
                found[name][n] += weight * value
    return found


def match(likeness_FF: Tensor, step: float = AUCTION_STEP) -> Tensor:
    """int64 (F,): the column of each row in a one-to-one matching of nearly the highest total likeness.

    In each round all unassigned rows bid for columns; the total is within F · ``step`` · max|likeness| of the
    best.
    """
    if not likeness_FF.isfinite().all():  # no bid would win
        raise CheckpointError("experts whose weights are not finite cannot be compared; use another checkpoint")
    F, device = len(likeness_FF), likeness_FF.device
    raise_by = step * float(likeness_FF.abs().max().clamp(min=1e-30))
    price_F = torch.zeros(F, dtype=likeness_FF.dtype, device=device)
    owner_F = torch.full((F,), -1, dtype=torch.int64, device=device)
    column_F = owner_F.clone()
    while len(bidders := (column_F < 0).nonzero().flatten()):
        value = likeness_FF[bidders] - price_F
        best = value.topk(min(2, F), 1)
        wanted = best.indices[:, 0]
        bid = price_F[wanted] + best.values[:, 0] - best.values[:, -1] + raise_by
        highest_F = torch.full_like(price_F, -torch.inf).scatter_reduce(0, wanted, bid, "amax")
        winner_F = torch.full_like(owner_F, -1)
        wins = bid == highest_F[wanted]
        winner_F[wanted[wins]] = bidders[wins]  # of equal bids, any one
        sold = (winner_F >= 0).nonzero().flatten()
        loses = owner_F[sold]
        column_F[loses[loses >= 0]] = -1
        owner_F[sold], column_F[winner_F[sold]], price_F[sold] = winner_F[sold], sold, highest_F[sold]
    return column_F
