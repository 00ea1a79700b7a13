"""Embedding tuning: texts that belong together get similar embeddings (:mod:`colonnade.model.contrastive`).

A row of the data is a query, a text that answers it, and hard negatives:

    {"query": "capital of France", "positive": "Paris is …", "negatives": ["Lyon is …"]}

The loss covers the batch of all data ranks, whatever the micro-batch: with several micro-batches all embeddings are
computed twice (GradCache). The pooling is stored in the checkpoint's cursor, from which the server reads it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.config import ModelConfig, RunConfig, TuneConfig
from colonnade.config.serve import Pooling
from colonnade.data import Batch, Loader, Tokenizer
from colonnade.data.loader import Objective
from colonnade.errors import ConfigError, DataError, RequestError
from colonnade.model import IGNORE, Transformer
from colonnade.model.contrastive import Contrast, ContrastiveLoss, contrastive_losses
from colonnade.train.data_feed import MakeFeed, VaryingFeed
from colonnade.train.model_inputs import model_inputs
from colonnade.tune.chats import Conversation, Conversations, Report, fit_conversation, read_rows
from colonnade.tune.packing import TuneFeed, check_tune_settings, pack_rows

TEMPERATURE = 0.05
"""Default of tune.temperature."""


class TextSamples:
    """Samples of ``contrast.texts`` texts; its objective's fields are those of :class:`Batch`."""

    def __init__(self, data: Conversations, sequence: int, contrast: Contrast):
        self._data, self._sequence, self._contrast = data, sequence, contrast
        self.samples = len(data) // contrast.texts
        """Samples in one epoch."""
        hashes = [hashlib.sha256(data.at(i)[0].tobytes()).digest()[:8] for i in range(len(data))]
        self._ids = np.frombuffer(b"".join(hashes), np.int64)

    def pack(self, samples: np.ndarray, numbers: np.ndarray) -> Batch:
        """The batch of these samples; uses no random numbers."""
        texts = [int(i) * self._contrast.texts + j for i in samples for j in range(self._contrast.texts)]
        batch = pack_rows([self._data.at(i) for i in texts], self._sequence, per_sample=self._contrast.texts)
        assert batch.first_R is not None
        targets_T = torch.full_like(batch.targets_T, IGNORE)
        targets_T[batch.first_R] = 0  # a query counts if its sample does
        ids_S = torch.from_numpy(self._ids[texts])
        return replace(batch, targets_T=targets_T, predicted_R=None, text_ids_S=ids_S, contrast=self._contrast)


def _text_samples(
    data: Conversations, held_out: Conversations, contrast: Contrast, run: RunConfig, validation: bool, fixed: bool
) -> Objective:
    assert not fixed, "no micro-batch is filled up"
    return TextSamples(held_out if validation else data, run.data.sequence, contrast)


class CachedSamples:
    """Yields a step's micro-batches, with cached gradients of their embeddings if there are several."""

    def __init__(self, loader: Loader):
        self._loader, self.samples, self.numbers = loader, loader.samples, loader.numbers
        self.batches: list[Batch] | None = None

    def at(self, seen: int) -> list[Batch]:
        """This rank's micro-batches of the step after ``seen`` samples."""
        return self._loader.at(seen) if self.batches is None else self.batches


class EmbedFeed(TuneFeed):
    """As :class:`~colonnade.tune.packing.TuneFeed`, with gradients of embeddings before each step."""

    generates = False

    def __init__(
        self,
        data: Conversations,
        held_out: Conversations,
        contrast: Contrast,
        run: RunConfig,
        rank: int = 0,
        ranks: int = 1,
    ):
        check_embed_settings(run)

        identity = {
            "method": "embed", "rows": data.sha256, "texts": contrast.texts, "pooling": contrast.pooling,
            "temperature": contrast.temperature, "widths": list(contrast.widths),
        }  # fmt: skip
        mean_tokens = contrast.texts * data.mean_tokens
        samples = partial(_text_samples, data, held_out, contrast)
        super().__init__(samples, identity, mean_tokens, len(held_out) // contrast.texts, run, rank, ranks)
        loader, self._contrast = self.samples, contrast
        assert isinstance(loader, Loader)
        self.samples: CachedSamples = CachedSamples(loader)

    def before_step(self, model: Transformer, seen: int) -> None:
        """Compute the gradients of all embeddings of the step after ``seen`` samples, if it has micro-batches."""
        self.samples.batches = None
        batches = self.samples.at(seen)
        if len(batches) == 1:
            return  # a single pass has all embeddings
        device, dp = next(model.parameters()).device, model.axes.dp
        batches = [batch.to(device) for batch in batches]
        parts, heads = list[Tensor](), list[ContrastiveLoss]()
        with torch.no_grad():
            for batch in batches:
                stream, attend, head = model_inputs(batch, model)
                assert isinstance(head, ContrastiveLoss)
                heads.append(head)
                parts.append(model(stream, attend, head.embeddings))
        x_SD = torch.cat(parts).requires_grad_()
        ids_S, valid_Q = torch.cat([head.ids_S for head in heads]), torch.cat([head.targets_Q for head in heads])
        loss_Q = contrastive_losses(x_SD, ids_S, valid_Q != IGNORE, self._contrast, dp)
        (gradient_SD,) = torch.autograd.grad(loss_Q.sum(), x_SD)
        gradients = gradient_SD.split([len(part) for part in parts])
        losses = loss_Q.detach().split([len(head.targets_Q) for head in heads])
        self.samples.batches = [
            replace(batch, embedding_gradient_SD=gradient, embedding_loss=loss.sum())
            for batch, gradient, loss in zip(batches, gradients, losses, strict=True)
        ]

    def step_metrics(self) -> dict[str, float]:
        """No further metrics."""
        return {}

    def messages(self) -> list[str]:
        """No lines."""
        return []

    def close(self) -> None:
        """Nothing to release."""


def check_embed_settings(run: RunConfig) -> None:
    """Raise :class:`ConfigError` for settings that do not apply to embedding tuning."""
    if check_tune_settings(run, generates=False) or run.plan.cp > 1:
        raise ConfigError(
            "embedding tuning supports only dp and tp, without train.compile, train.cuda_graph or a recompute "
            "budget; remove these, --plan.pp and --plan.cp"
        )
    if run.model.moe is not None or run.model.encoder is not None:
        raise ConfigError("embedding tuning supports dense decoders and encoders; use another model")
    if run.micro_batches > 1 and (run.train.dropout or run.train.attention_dropout or run.train.embedding_dropout):
        raise ConfigError(
            f"with {run.micro_batches} micro-batches embeddings are computed twice, and dropout would make the two "
            "differ; remove dropout, or set --train.micro_batch to a rank's whole batch"
        )


def resolve_contrast(model: ModelConfig, tune: TuneConfig, texts: int) -> Contrast:
    """The settings for ``model``; raises :class:`ConfigError` for widths that it does not have."""
    default: Pooling = "last" if model.causal else "mean"
    widths = tuple(sorted(set(tune.widths), reverse=True)) or (model.width,)
    if not 0 < widths[-1] <= widths[0] <= model.width:
        raise ConfigError(f"tune.widths are {', '.join(map(str, tune.widths))}; choose from 1 to {model.width}")
    temperature = TEMPERATURE if tune.temperature is None else tune.temperature
    return Contrast(tune.pooling or default, temperature, widths, texts)


def read_texts(
    path: str | Path, tokenizer: Tokenizer, run: RunConfig, *, truncate: bool, report: Report = lambda _line: None
) -> tuple[Conversations, int]:
    """The texts of all rows of a file, and the number per row; raises :class:`DataError` for invalid rows."""
    texts: list[Conversation] = []
    each = 0
    for where, row in read_rows(path, report):
        parts = _parts(row, where)
        if each not in (0, len(parts)):
            raise DataError(
                f"{where} has {len(parts) - 2} negatives, but the rows before it have {each - 2}; all rows need the "
                "same number"
            )
        each = len(parts)
        for text in parts:
            try:
                tokens, _ = tokenizer.encode_truncated(text, max_tokens=run.data.sequence if truncate else None)
            except RequestError as why:
                raise DataError(f"{where}: {why}") from None
            if not tokens:
                raise DataError(f"{where} has an empty text; fill it in, or remove the row")
            texts.append(
                fit_conversation(
                    Conversation(tokens, [True] * len(tokens)), run.data.sequence, run.model.vocab_size, where,
                    truncate=truncate,
                )
            )  # fmt: skip
    return Conversations(texts), each


def _parts(row: Mapping[str, Any], where: str) -> list[str]:
    negatives: object = row.get("negatives", [])
    parts = [row.get("query"), row.get("positive"), *(negatives if isinstance(negatives, list) else [None])]
    if not all(isinstance(part, str) for part in parts):
        raise DataError(
            f"{where} needs the strings 'query' and 'positive', and 'negatives', if given, must be a list of strings; "
            "fix the row"
        )
    return parts  # type: ignore[return-value]


def embed_feed(data: Conversations, held_out: Conversations, contrast: Contrast) -> MakeFeed:
    """The data feed of embedding tuning; raises :class:`DataError` without rows."""
    if not len(data):
        raise DataError("there are no rows; pass at least one query with its positive")
    return VaryingFeed(partial(EmbedFeed, data, held_out, contrast))


def check_same_texts(counts: Sequence[int], path: str | Path) -> None:
    """Raise :class:`DataError` unless training and held-out rows have the same number of texts."""
    if len(set(counts)) > 1:
        raise DataError(f"{path} has {counts[1] - 2} negatives per row, but the training data has {counts[0] - 2}")
