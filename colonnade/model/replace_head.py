"""Another top for an encoder: what fine-tuning begins with."""

import torch

from colonnade.config.model import TaskHead
from colonnade.model.initialise import initialise
from colonnade.model.transformer import Transformer


@torch.no_grad()
def replace_head(model: Transformer, top: TaskHead, *, classes: int = 0, seed: int = 0) -> Transformer:
    """A model like ``model`` (an encoder of plain local tensors) with another top, on the same axes.

    What both have is copied, the pooler too; what is new is drawn from ``seed``. Raises :class:`ConfigError` for a
    top that this model cannot have.
    """
    config = model.config.replace(top=top, classes=classes)
    old = dict(model.named_parameters())
    first = next(iter(old.values()))
    fresh = initialise(Transformer(config, model.axes, device=first.device, dtype=first.dtype), seed)
    for name, parameter in fresh.named_parameters():
        if name in old and old[name].shape == parameter.shape:
            parameter.copy_(old[name])
    return fresh
