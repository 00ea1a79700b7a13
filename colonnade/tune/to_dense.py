"""A dense model from a mixture of experts: the hidden units that contribute most, with new output weights.

    y(x) = Σ_e w_e(x) Σ_j h_ej(x) down_ej                      the mixture; w_e is 0 for experts that were not chosen
    F(x) = Σ_(e,j chosen) h_ej(x) D_ej                         hidden width A · F_e
    chosen: the largest  Σ_x (w_e(x) h_ej(x))² ‖down_ej‖²
    D = argmin Σ_x ‖y(x) − F(x)‖² + λ ‖D − D₀‖²,    D₀ = mean_x w_e(x) · down_ej

The sums are over the tokens of some text, block after block of the mixture. The layer is linear in D, so the fit is one
linear system (ridge regression). Attention, embeddings and norms are the teacher's, and shared experts are appended.
A model of one expert computes the same: D₀ is exact there. Others need training, preferably by distillation from the
mixture (:mod:`colonnade.train.distill`). Layers that are narrower than the widest are padded with hidden units of zero.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.compress.calibrate import BlockRunner
from colonnade.config import ModelConfig
from colonnade.errors import ConfigError, DataError, PlanError
from colonnade.kernels.experts.reference import ACTIVATIONS, Weights
from colonnade.model import Transformer
from colonnade.model.ffn import FeedForward
from colonnade.model.moe import MixtureOfExperts
from colonnade.model.weight_memory import WeightMemory
from colonnade.tune.expert_subsets import LayerInputs, router_weights
from colonnade.tune.prune_experts import check_dense, check_transformer

DENSE_FAMILY = {"mixtral": "llama", "qwen2_moe": "qwen2", "qwen3_moe": "qwen3"}
"""The families of dense models with the same layers."""
RIDGE = 1e-3
"""λ, relative to the mean of Σ_x h_ej(x)²."""


def dense_config(config: ModelConfig, keep: int) -> ModelConfig:
    """The config of the dense model of ``keep`` experts' width; raises :class:`ConfigError` if there is none."""
    moe = config.moe
    if moe is None:
        raise ConfigError("this model has no experts to make dense layers of")
    if moe.merged:
        raise ConfigError(f"the {moe.experts} experts are already merged into {moe.merged}; convert the original model")
    if not 1 <= keep <= moe.experts:
        raise ConfigError(f"{keep} of {moe.experts} experts cannot be kept; use 1 to {moe.experts}")
    if moe.shared_gate:
        raise ConfigError(
            "the gate of shared experts depends on the token, which a dense layer cannot represent; prune instead"
        )
    width = keep * moe.ffn_width + moe.shared_width
    if moe.count_expert_layers(config.layers) < config.layers:
        width = max(width, config.ffn_width)
    return config.replace(family=DENSE_FAMILY.get(config.family, config.family), moe=None, ffn_width=width)


@torch.no_grad()
def to_dense(model: Transformer, texts: Sequence[Tensor], keep: int | None = None) -> Transformer:
    """A dense model with as many hidden units as ``keep`` experts (None: as many as a token uses), fitted on ``texts``,
    int64 tokens (T,) each.

    ``model`` is whole, on one process. Raises :class:`ConfigError` as :func:`dense_config`, :class:`PlanError` for a
    sharded model, :class:`DataError` for fewer tokens than hidden units.
    """
    check_transformer(model)
    if (ranks := model.axes.experts.tokens.size) > 1:
        raise PlanError(
            f"this needs the whole model in one process, but it is sharded over {ranks}; load it without a plan"
        )
    check_dense(model)
    moe = model.config.moe
    keep = keep or (1 if moe is None else moe.active)
    config = dense_config(model.config, keep)
    assert moe is not None
    if (tokens := sum(map(len, texts))) < config.ffn_width:
        raise DataError(
            f"{tokens} tokens are too few to fit layers of {config.ffn_width} hidden units; pass at least as many"
        )
    sample = next(model.parameters())
    WeightMemory(config, sample.dtype, sample.device).check("the dense model")
    new = Transformer(config, device=sample.device, dtype=sample.dtype)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in (*new.named_parameters(), *new.named_buffers()):
        if name in tensors:
            _fill(tensor, tensors[name])
    runner = BlockRunner(model, texts)
    for layer in range(config.layers):
        mixture, dense = (each.blocks.get_submodule(f"{layer}.ffn") for each in (model, new))
        with _recording(mixture) as seen:
            runner.advance(layer)
        if isinstance(mixture, MixtureOfExperts):
            assert isinstance(dense, FeedForward)
            _choose(dense, mixture, seen, keep * moe.ffn_width)
            _fit(dense, seen)
    return new


Seen = list[tuple[LayerInputs, Tensor]]
"""Inputs and outputs (T, D) of a layer, for each text."""


@contextmanager
def _recording(layer: nn.Module) -> Iterator[Seen]:
    """Records the inputs and outputs of a mixture while its block runs."""
    seen: Seen = []

    def record(_: nn.Module, arguments: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x_TD, _T, routing = arguments[:3]
        seen.append((LayerInputs(x_TD, routing.tokens_T, routing.routing.index_T), output[0]))

    handle = layer.register_forward_hook(record) if isinstance(layer, MixtureOfExperts) else None
    try:
        yield seen
    finally:
        if handle is not None:
            handle.remove()


def _choose(dense: FeedForward, mixture: MixtureOfExperts, seen: Seen, count: int) -> None:
    """Set ``dense`` to the ``count`` hidden units that contribute most, and D₀."""
    weights, E = mixture.experts.stored, mixture.moe.experts
    assert isinstance(weights, Weights)
    act = ACTIVATIONS[mixture.experts.activation]
    energy_EF = torch.zeros(weights.up_EFD.shape[:2], dtype=torch.float64, device=weights.up_EFD.device)
    total_E, tokens = energy_EF.new_zeros(E), sum(len(y_TD) for _, y_TD in seen)
    for inputs, _ in seen:
        w_TE = router_weights(mixture.router, inputs, E)
        total_E += w_TE.sum(0)
        for e in range(E):
            up_FD, down_FD, gate_FD, up_b, gate_b, _down_b = weights.expert(e)
            used_c = w_TE[:, e].nonzero().flatten()
            x_cD = inputs.x_TD[used_c]
            h_cF = _hidden(x_cD, up_FD, up_b, gate_FD, gate_b, act).double() * w_TE[used_c, e, None]
            energy_EF[e] += h_cF.square().sum(0) * down_FD.double().square().sum(1)
    chosen, mean_E = energy_EF.flatten().topk(count).indices.sort().values, total_E / tokens
    shared = {} if mixture.shared is None else dict(mixture.shared.named_parameters())
    scaled_EFD = mean_E.to(weights.down_EFD.dtype)[:, None, None] * weights.down_EFD
    stacks = {
        "up.weight": weights.up_EFD, "gate.weight": weights.gate_EFD, "down.weight": scaled_EFD,
        "up.bias": weights.up_bias_EF, "gate.bias": weights.gate_bias_EF,
    }  # fmt: skip
    for name, stack in stacks.items():
        if stack is None:
            continue
        units, cut = stack.flatten(0, 1)[chosen], 0  # hidden units first
        if name == "down.weight":
            units, cut = units.T, 1
        _fill(dense.get_parameter(name), torch.cat((units, shared[name]), cut) if name in shared else units)
    if weights.down_bias_ED is not None:
        bias_D = mean_E.to(weights.down_bias_ED.dtype) @ weights.down_bias_ED
        _fill(dense.get_parameter("down.bias"), bias_D + shared.get("down.bias", 0))


def _fit(dense: FeedForward, seen: Seen) -> None:
    """Move the output weights and bias of ``dense`` from D₀ to the best fit."""
    down = dense.down
    exact = torch.float32 if down.weight.is_cuda else torch.float64
    prior = [down.weight.T] if down.bias is None else [down.weight.T, down.bias[None]]
    D_fD = torch.cat(prior).to(exact)
    gram_ff, cross_fD = D_fD.new_zeros(len(D_fD), len(D_fD)), torch.zeros_like(D_fD)
    gate = dense.gate
    for inputs, y_TD in seen:
        h_Tf = _hidden(
            inputs.x_TD, dense.up.weight, dense.up.bias, None if gate is None else gate.weight,
            None if gate is None else gate.bias, dense.act,
        ).to(exact)  # fmt: skip
        if down.bias is not None:
            h_Tf = torch.cat((h_Tf, h_Tf.new_ones(len(h_Tf), 1)), 1)
        gram_ff.addmm_(h_Tf.T, h_Tf)
        cross_fD.addmm_(h_Tf.T, y_TD.to(exact) - h_Tf @ D_fD)
    gram_ff.diagonal().add_(RIDGE * gram_ff.diagonal().mean())
    D_fD += torch.cholesky_solve(cross_fD, torch.linalg.cholesky(gram_ff))
    down.weight.copy_(D_fD[: down.weight.shape[1]].T)
    if down.bias is not None:
        down.bias.copy_(D_fD[-1])


def _hidden(
    x_TD: Tensor,
    up_FD: Tensor,
    up_b: Tensor | None,
    gate_FD: Tensor | None,
    gate_b: Tensor | None,
    act: Callable[[Tensor], Tensor],
) -> Tensor:
    up_TF = F.linear(x_TD, up_FD, up_b)
    return act(up_TF) if gate_FD is None else act(F.linear(x_TD, gate_FD, gate_b)) * up_TF


def _fill(tensor: Tensor, value: Tensor) -> None:
    """Copy ``value`` to the beginning of ``tensor`` and zero the rest."""
    tensor.zero_()[tuple(slice(n) for n in value.shape)].copy_(value)
