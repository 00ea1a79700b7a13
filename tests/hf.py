"""Helpers for tests of Hugging Face weights; does not import transformers, because workers import this."""

from pathlib import Path

import torch
from torch import Tensor

from colonnade.checkpoint.hf.read import HFFolder
from colonnade.checkpoint.hf.write import write_hf
from colonnade.config import Plan
from colonnade.model import IGNORE, Packed, Rows, Stream, Transformer
from colonnade.parallel.axis import SOLO_AXES, Axes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters

LENGTHS = [9, 2, 14]


def documents(vocab_size: int) -> list[Tensor]:
    """Ragged token sequences."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (n,), generator=generator) for n in LENGTHS]


def stream_of(texts: list[Tensor], *, causal: bool = True) -> tuple[Stream, Packed, Tensor]:
    """The documents concatenated into a stream, with next-token targets."""
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    targets = torch.cat([torch.cat((text[1:], torch.tensor([IGNORE]))) for text in texts])
    return Stream(torch.cat(texts), positions), Packed.of([len(text) for text in texts], causal=causal), targets


def load(folder: Path, axes: Axes = SOLO_AXES, dtype: torch.dtype = torch.float64) -> Transformer:
    """Load a Hugging Face folder as our model."""
    files = HFFolder(folder)
    model = Transformer(files.config, axes, dtype=dtype)
    files.load_weights(model)
    return model


def load_and_save(folder: Path, plan: Plan, out: Path) -> Tensor:
    """In a worker: load ``folder`` under ``plan``, save it again as ``out`` in small shards, return the logits."""
    with DistributedContext.build(plan, "cpu") as context:
        model = load(folder, context.axes)
        masters(model, context, torch.float64)
        write_hf(model, out, shard_bytes=4000)
        stream, attend, _ = stream_of(documents(model.config.vocab_size), causal=model.config.causal)
        return model(stream, attend, Rows()).detach()


def fail_to_write(folder: Path, plan: Plan, out: Path) -> str:
    """In a worker: save to a path that cannot be written; returns this rank's error message."""
    from colonnade.errors import CheckpointError

    with DistributedContext.build(plan, "cpu") as context:
        try:
            write_hf(load(folder, context.axes), out)
        except CheckpointError as error:
            return str(error)
    return ""


def resave(folder: Path, plan: Plan, out: Path) -> tuple[dict[str, int], Tensor]:
    """In a worker: load ``folder`` under ``plan`` and save it again as ``out``.

    Returns this rank's share of each expert stack and the logits.
    """
    with DistributedContext.build(plan, "cpu") as context:
        model = load(folder, context.axes)
        write_hf(model, out, shard_bytes=4000)
        stream, attend, _ = stream_of(documents(model.config.vocab_size), causal=model.config.causal)
        held = {name: p.numel() for name, p in model.named_parameters() if ".experts." in name}
        return held, model(stream, attend, Rows()).detach()
