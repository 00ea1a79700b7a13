"""A small model with a tokenizer, data to fine-tune it on, and plain torch losses to compare with."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import colonnade
from colonnade.checkpoint import native
from colonnade.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from colonnade.model import Packed, Rows, Stream, Transformer
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.data_feed import MakeFeed
from colonnade.train.initial_weights import check_start
from colonnade.train.loop import train
from colonnade.train.trackers import read_rows
from tests.models import build
from tests.serve import tiny

MODEL = ModelConfig(
    vocab_size=301, layers=2, width=24, heads=8, kv_heads=4, head_width=6, ffn_width=34, context=64, init_std=0.2
)
TRAIN = TrainConfig(
    steps=4, batch=4, micro_batch=4, lr=1e-2, min_lr=0, warmup=1, dtype="float64", schedule="linear", clip=0.5,
    save_every=2, log_every=1,
)  # fmt: skip


def start(folder: Path, config: ModelConfig = MODEL) -> Path:
    """A float64 model with a tokenizer and a chat template."""
    path = folder / "start"
    if not path.exists():
        meta = native.Meta(model=config)
        native.save(path, build(config), meta, DistributedContext.solo(), tokenizer=tiny.tokenizer())
    return path


def settings(runs: Path, start_folder: Path, config: ModelConfig = MODEL, **train_settings: Any) -> RunConfig:
    """The run that tunes the model in ``start_folder``."""
    return RunConfig(
        name="it", runs=runs, device="cpu", model=config, data=DataConfig(sequence=48),
        train=TRAIN.replace(pretrained_checkpoint=str(start_folder), **train_settings),
    )  # fmt: skip


def fit(run: RunConfig, feed: MakeFeed) -> None:
    train(run, (), feed)


def history(run: RunConfig) -> list[float]:
    return [row[key] for row in read_rows(run.folder) for key in ("loss", "grad_norm", "validation_loss") if key in row]


def weights(run: RunConfig) -> dict[str, Tensor]:
    return colonnade.load(run.folder, device="cpu", dtype="float64").transformer.state_dict()


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def logp(model: Transformer, tokens: list[int]) -> Tensor:
    """Plain torch: log p of each token but the first given the ones before it."""
    tokens_T = torch.tensor(tokens)
    stream = Stream(tokens_T, torch.arange(len(tokens)))
    logits_TV = model(stream, Packed.of([len(tokens)]), Rows())
    return logits_TV.log_softmax(1)[:-1].gather(1, tokens_T[1:, None]).squeeze(1)


def norm(model: Transformer) -> Tensor:
    """The norm of the whole gradient."""
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()


def fit_checked(run: RunConfig) -> None:
    """Raise what the checks before a run raise."""
    check_start(run, None)
