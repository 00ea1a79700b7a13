"""Expert pruning: measures the experts' load on a task's text and removes the least used ones.

    load_LE = choices by layer and expert over some text            (:func:`measure`)
    keep the n experts of the highest load in each layer             (:func:`prune`)

The router's scores of the remaining experts do not change, and it selects the best of them. If a token's weights are
normalised over its chosen experts, tokens that never chose a removed expert are computed exactly as before; so are
sigmoid weights. Unnormalised softmax weights (OLMoE, Qwen2-MoE, DeepSeek-V2) are shares of all experts' scores and grow
when experts are removed: there the outputs change.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from colonnade.config import ModelConfig
from colonnade.errors import ConfigError, DataError, PlanError
from colonnade.model import Hidden, Packed, Stream, Transformer
from colonnade.model.moe import Routing
from colonnade.model.weight_memory import WeightMemory
from colonnade.model.weight_only_quant import quantised_kind


def check_transformer(model: object) -> None:
    """Raise :class:`ConfigError` for anything but a transformer, such as the result of ``colonnade.load``."""
    if isinstance(model, Transformer):
        return
    remedy = "pass its .transformer" if hasattr(model, "transformer") else "pass a colonnade.model.Transformer"
    raise ConfigError(f"expected a Transformer, not a {type(model).__name__}; {remedy}")


def check_dense(model: Transformer) -> None:
    """Raise :class:`ConfigError` for quantised weights, which have no rows to choose or to append."""
    if (kind := quantised_kind(model)) is not None:
        raise ConfigError(f"this model's weights are in {kind}; load it with weights='dense'")


def route(model: Transformer, text: Tensor) -> Routing:
    """The routing of ``text``, int64 tokens (T,), by the mixtures of ``model``."""
    device = next(model.parameters()).device
    positions_T = torch.arange(len(text), device=device)
    routing = Routing(positions_T)
    stream = Stream(text.to(device), positions_T, routing=routing)
    model(stream, Packed.of([len(text)], device, causal=model.config.causal), Hidden())
    return routing


@torch.no_grad()
def measure(model: Transformer, texts: Iterable[Tensor]) -> Tensor:
    """load_LE int64: the choices of each expert of each layer in ``texts``, int64 tokens (T,) each.

    0 in layers without experts. Raises :class:`ConfigError` for a dense model, :class:`DataError` without text.
    """
    check_transformer(model)
    config, device = model.config, next(model.parameters()).device
    if config.moe is None:
        raise ConfigError("this model has no experts whose load could be measured")
    load_LE = torch.zeros(config.layers, config.moe.experts, dtype=torch.int64, device=device)
    for text in texts:
        if not isinstance(text, Tensor):
            raise DataError(
                f"each text must be a tensor of token ids, not a {type(text).__name__}; encode it: "
                "torch.tensor(model.tokenizer.encode(text))"
            )
        for layer, report in route(model, text).reports.items():
            load_LE[layer] += report.load_E
    if not load_LE.any():
        raise DataError("there was no text to measure the experts' load on; pass some text of the task")
    return load_LE


@torch.no_grad()
def prune(model: Transformer, load_LE: Tensor, keep: int) -> Transformer:
    """A new model with the ``keep`` experts of each layer that have the highest load, in their order.

    ``model`` is whole, on one process. Raises :class:`PlanError` for a sharded model, :class:`ConfigError` for a
    quantised one, an impossible ``keep``, loads of another model, and expert groups, which would become unequal.
    """
    check_transformer(model)
    if (ranks := model.axes.experts.tokens.size) > 1:
        raise PlanError(
            f"pruning needs the whole model in one process, but this one is sharded over {ranks}; load it without a "
            "plan"
        )
    check_dense(model)
    config = pruned_config(model.config, load_LE, keep)
    sample = next(model.parameters())
    WeightMemory(config, sample.dtype, sample.device).check(f"the model with {keep} experts")
    new = Transformer(config, device=sample.device, dtype=sample.dtype)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes, old_shapes = new.global_shapes(), model.global_shapes()
    for name, tensor in (*new.named_parameters(), *new.named_buffers()):
        if shapes[name] == old_shapes[name]:
            tensor.copy_(tensors[name])
        else:  # has a row for each expert: stacks, gates, biases
            layer = int(name.split(".")[1])
            kept_e = load_LE[layer].topk(keep).indices.sort().values
            tensor.copy_(tensors[name][kept_e])
    return new


def pruned_config(config: ModelConfig, load_LE: Tensor, keep: int) -> ModelConfig:
    """The config of the pruned model; raises as :func:`prune`."""
    moe = config.moe
    if moe is None or load_LE.shape != (config.layers, moe.experts):
        known = "no experts" if moe is None else f"{config.layers} layers of {moe.experts} experts"
        raise ConfigError(f"loads of {tuple(load_LE.shape)} belong to another model; this one has {known}")
    check_keep(config, keep)
    return config.replace(moe=moe.replace(experts=keep))


def check_keep(config: ModelConfig, keep: int) -> None:
    """Raise :class:`ConfigError` unless ``keep`` experts of a layer can be kept."""
    moe = config.moe
    if moe is None:
        raise ConfigError("this model is dense: it has no experts to choose from; remove --keep")
    if moe.merged:
        raise ConfigError(
            f"the {moe.experts} experts are already merged into {moe.merged}; prune those of the original model"
        )
    if not moe.active <= keep <= moe.experts:
        raise ConfigError(
            f"{keep} of {moe.experts} experts cannot be kept, because a token uses {moe.active}; keep {moe.active} to "
            f"{moe.experts}"
        )
    if moe.router.groups > 1:
        raise ConfigError(
            f"the experts are in {moe.router.groups} groups, which pruning would make unequal; set moe.router.groups "
            "to 1 first, if the router may choose among all of them"
        )
