"""Checkpoints of the tiny model with other weights, to be swapped into a running engine."""

from pathlib import Path
from typing import Any

import torch

from colonnade.checkpoint import native
from colonnade.data.tokenizer import Tokenizer
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from tests.serve import tiny


def save(
    folder: Path, seed: int = 2, tokenizer: Tokenizer | None = None, poison: str | None = None, **changes: Any
) -> Transformer:
    """Write a checkpoint of the tiny model, initialised from ``seed``; the last value of ``poison`` is NaN."""
    config = tiny.config(**changes)
    model = initialise(Transformer(config, dtype=torch.float32), seed=seed)
    if poison is not None:
        with torch.no_grad():
            model.get_parameter(poison).view(-1)[-1] = torch.nan
    solo, tokenizer = DistributedContext.solo(), tokenizer or tiny.tokenizer()
    native.save(folder, model, native.Meta(model=config), solo, tokenizer=tokenizer, overwrite=True)
    return model
