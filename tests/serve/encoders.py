"""Tiny encoders and what they must answer, by plain arithmetic over one text at a time."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from colonnade.api import Model, save
from colonnade.config import ModelConfig, ServeConfig
from colonnade.config.presets import preset
from colonnade.data.tokenizer import Tokenizer
from colonnade.model import Packed, Stream, Transformer, initialise
from colonnade.model.output_heads import Hidden
from colonnade.parallel.axis import SOLO_AXES, Axes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve.pooler_spec import PoolerSpec
from colonnade.serve.pooling_engine import PoolingEngine
from colonnade.serve.pooling_request import PoolingOutput
from tests.serve import tiny

TEXTS = ["we the people", "a dog", "The quick brown fox jumps over the lazy dog.", "", "in order to form a union", "x"]
CONTEXT = 40


@cache
def tokenizer() -> Tokenizer:
    """A WordPiece vocabulary with [CLS] and [SEP] around each text."""
    return Tokenizer.train_wordpiece(tiny.TEXT, 260)


def config(**changes: object) -> ModelConfig:
    """A BERT with odd sizes and a context of 40 tokens."""
    sizes = {"layers": 2, "width": 24, "heads": 4, "ffn_width": 37, "context": CONTEXT, "init_std": 0.3}
    encoder = {"task_head": "encoder", "vocab_size": tokenizer().vocab_size}
    return preset("bert-base").replace(**{**sizes, **encoder, **changes})


def classifier(classes: int) -> ModelConfig:
    """The same with a class head."""
    return config(task_head="classes", classes=classes)


def model(it: ModelConfig, axes: Axes = SOLO_AXES, dtype: torch.dtype = torch.float32, seed: int = 3) -> Transformer:
    """Initialised from ``seed``; the class head too."""
    return initialise(Transformer(it, axes, dtype=dtype), seed=seed).eval().requires_grad_(False)


def write(folder: Path, it: ModelConfig, poison: int | None = None, seed: int = 3) -> Path:
    """A Hugging Face folder with a model of ``it``; the embedding of token ``poison`` is NaN."""
    written, context = model(it, seed=seed), DistributedContext.solo(torch.device("cpu"))
    if poison is not None:
        written.get_parameter("embed.tokens.weight")[poison] = torch.nan
    return save(Model(written, tokenizer(), context, "tiny"), folder, format="hf")


def hidden(it: Transformer, ids: list[int]) -> Tensor:
    """hidden_TD of one text."""
    attend = Packed.of([len(ids)], causal=it.config.causal)
    return it(Stream(torch.tensor(ids), torch.arange(len(ids))), attend, Hidden())


def embedding(it: Transformer, ids: list[int], pooling: str = "mean") -> Tensor:
    """The normalised embedding of one text."""
    x_TD = hidden(it, ids)
    x_D = {"mean": x_TD.mean(0), "cls": x_TD[0], "last": x_TD[-1]}[pooling]
    return x_D / x_D.norm()


def engine(it: Transformer, spec: PoolerSpec, **limits: object) -> PoolingEngine:
    """An engine with these limits."""
    return PoolingEngine(it, tokenizer(), ServeConfig(**limits), spec)  # type: ignore[arg-type]


def add(to: PoolingEngine, name: str, texts: list[list[int]], **options: int) -> list[str]:
    """Queue a request; returns the ids of its texts."""
    ids = [f"{name}{i}" for i in range(len(texts))]
    to.add(ids, [(ids, None) for ids in texts], fields=[("input", len(texts))], **options)
    return ids


def run(it: PoolingEngine) -> dict[str, PoolingOutput]:
    """All outputs by id, of as many steps as it takes."""
    found = {}
    while it.busy:
        found |= {output.id: output for output in it.step()}
    return found
