"""The routing page: the experts that receive each token, over the text and over the steps of a training run.

For each layer: the router's choices and those kept within the capacity, by expert; the same for windows of consecutive
tokens; the entropy of the load, -Σ p log p; and, for a run with routing.jsonl, its training steps.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from colonnade.errors import RequestError
from colonnade.look.recorder import LayerRecord, Recording
from colonnade.model.moe.capacity import capacity

WINDOWS = 32
"""Maximum number of windows of a text."""
History = Mapping[str, Mapping[str, list]]
"""By layer: lists of ``step``, ``load``, ``dropped`` and ``entropy``."""


def entropy(load: Sequence[int]) -> float:
    """The entropy of the shares of a load [nats]."""
    total = max(1, sum(load))
    return -sum(n / total * math.log(n / total) for n in load if n)


def routing_board(recording: Recording, history: History) -> dict[str, Any]:
    """The data that the page draws; raises :class:`RequestError` for a model without experts."""
    config, T = recording.config, len(recording.tokens)
    moe = config.moe
    if moe is None:
        raise RequestError("this model has no experts; the routing page is for a mixture of experts", param="page")
    layers = [_layer(i, recording.layers[i], moe.experts) for i in range(config.layers) if config.experts_of(i)]
    note = f"{T} tokens, {moe.active} of {moe.experts} experts each."
    if moe.capacity:
        factor, share = abs(moe.capacity), -(-T // moe.experts)
        places = capacity(factor, moe.active, T, moe.experts)
        note += (
            f" Capacity {moe.capacity:g}: an expert takes at most {moe.active} x int({factor:g} x {share}) = {places} "
            f"choices, where {share} is {T} tokens / {moe.experts} experts, rounded up. Later choices are dropped."
        )
    for layer in layers:
        layer["history"] = history.get(str(layer["layer"]))
    return {"run": recording.run, "experts": moe.experts, "layers": layers, "title": "Routing", "note": note}


def _layer(number: int, record: LayerRecord, experts: int) -> dict[str, Any]:
    ids_TA, kept_TA = record["choice_ids"], record["kept_ids"]
    size = -(-len(ids_TA) // WINDOWS)
    windows = [_counts(a, b, experts) for a, b in zip(ids_TA.split(size), kept_TA.split(size), strict=True)]
    return {"layer": number, "window_tokens": size, "windows": windows, **_counts(ids_TA, kept_TA, experts)}


def _counts(ids_TA: torch.Tensor, kept_TA: torch.Tensor, experts: int) -> dict[str, Any]:
    load, kept = (x[x < experts].bincount(minlength=experts).tolist() for x in (ids_TA, kept_TA))
    return {"load": load, "kept": kept, "dropped": sum(load) - sum(kept), "entropy": entropy(load)}
