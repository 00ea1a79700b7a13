"""Selects the subset of experts with the layer output nearest to that of all experts (NAEE, arXiv 2402.14800, section
3.1).

    minimise Σ_x ‖F_S(x) − F(x)‖²  over the subsets S of N experts of a layer

F_S is the layer with the experts and the router's scores of S alone. Both are weighted sums of the experts' outputs:
with G_x[e, e'] = f_e(x) · f_e'(x) and the difference d of the weights, ‖F_S(x) − F(x)‖² = dᵀ G_x d. So each expert is
computed once for each token, whatever the number of subsets.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig
from colonnade.errors import ConfigError, DataError
from colonnade.kernels.experts import reference
from colonnade.kernels.experts.reference import Weights
from colonnade.model import Transformer
from colonnade.model.moe import MixtureOfExperts, Router
from colonnade.parallel.axis import SOLO_AXES
from colonnade.tune.prune_experts import check_keep, check_transformer, route

MAX_SUBSETS = 12_870
"""8 of 16 experts."""


def check_subsets(config: ModelConfig, keep: int) -> None:
    """Raise :class:`ConfigError` unless :func:`keep_by_output` can choose ``keep`` experts of a layer."""
    check_keep(config, keep)
    experts = 0 if config.moe is None else config.moe.experts
    if (subsets := math.comb(experts, keep)) > MAX_SUBSETS:
        raise ConfigError(
            f"{keep} of {experts} experts are {subsets:,} subsets, more than the {MAX_SUBSETS:,} that are tried; "
            "use --score reap"
        )


@torch.no_grad()
def keep_by_output(
    model: Transformer,
    texts: Iterable[Tensor],
    keep: int,
    progress: Callable[[int, int], object] = lambda _done, _of: None,
) -> Tensor:
    """kept_LE: 1 for the ``keep`` experts of each layer that change its outputs least, for :func:`prune`.

    ``progress(done, of)`` counts layers. Raises :class:`ConfigError` for a model without experts, an impossible
    ``keep`` and too many subsets, :class:`DataError` without text.
    """
    check_transformer(model)
    check_subsets(model.config, keep)
    moe = model.config.moe
    assert moe is not None
    layers = {
        int(name.split(".")[1]): module
        for name, module in model.named_modules()
        if isinstance(module, MixtureOfExperts)
    }
    if any(module.experts.quantised for module in layers.values()):
        raise ConfigError("quantised experts cannot be compared; load the model with weights='dense'")
    inputs = {layer: list[LayerInputs]() for layer in layers}
    with _recording(layers, inputs):
        for text in texts:
            route(model, text)
    if not all(inputs.values()):
        raise DataError("there was no text to compare experts on; pass some text of the task")
    kept_LE = torch.zeros(model.config.layers, moe.experts)
    for done, (layer, module) in enumerate(layers.items(), 1):
        kept_LE[layer, list(_best(model.config, module, inputs.pop(layer), keep))] = 1
        progress(done, len(layers))
    return kept_LE


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of a layer for one text."""

    x_TD: Tensor
    ids_T: Tensor
    index_T: Tensor


@contextmanager
def _recording(layers: dict[int, MixtureOfExperts], inputs: dict[int, list[LayerInputs]]) -> Iterator[None]:
    def hook(layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def record(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            x_TD, _T, routing = arguments[:3]
            inputs[layer].append(LayerInputs(x_TD, routing.tokens_T, routing.routing.index_T))

        return record

    handles = [module.register_forward_pre_hook(hook(layer)) for layer, module in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _best(config: ModelConfig, module: MixtureOfExperts, texts: list[LayerInputs], keep: int) -> tuple[int, ...]:
    weights, E = module.experts.stored, module.moe.experts
    assert isinstance(weights, Weights)
    whole, products = [], []
    for text in texts:
        T = len(text.x_TD)
        ends_E = torch.arange(1, E + 1, device=text.x_TD.device) * T
        y_RD = reference.experts(text.x_TD.repeat(E, 1), ends_E, weights, module.experts.activation)
        f_TED = y_RD.view(E, T, -1).transpose(0, 1).double()
        products.append(f_TED @ f_TED.mT)
        whole.append(router_weights(module.router, text, E))
    smaller = Router(
        config, module.moe.replace(experts=keep), SOLO_AXES, device=texts[0].x_TD.device, dtype=texts[0].x_TD.dtype
    )
    own = dict((*module.router.named_parameters(), *module.router.named_buffers()))
    best, least = (), math.inf
    for subset in combinations(range(E), keep):
        for name, tensor in (*smaller.named_parameters(), *smaller.named_buffers()):
            tensor.copy_(own[name] if own[name].shape == tensor.shape else own[name][list(subset)])
        error = 0.0
        for text, w_TE, product_TEE in zip(texts, whole, products, strict=True):
            d_TE = -w_TE
            d_TE[:, list(subset)] += router_weights(smaller, text, keep)
            error += float(torch.einsum("te,tef,tf->", d_TE, product_TEE, d_TE))
        if error < least:
            best, least = subset, error
    return best


def router_weights(router: Router, text: LayerInputs, E: int) -> Tensor:
    """w_TE float64: each token's weight of each expert."""
    choice, _ = router(text.x_TD, text.ids_T, text.index_T, None)
    w_TE = torch.zeros(len(text.x_TD), E + 1, dtype=torch.float64, device=text.x_TD.device)
    return w_TE.scatter_add_(1, choice.ids_TA, choice.weights_TA.double())[:, :E]
