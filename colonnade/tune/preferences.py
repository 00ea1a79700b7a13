"""Preference tuning: samples of two conversations, and the reference model's scores of both.

The reference is the model that the run starts from. Its scores are computed once, before the first step, by all ranks
under the run's own plan, and stored in ``runs/NAME/reference-….npy``, which every rank maps into memory. If a resumed
run lacks the file, it computes the scores again from the same weights (with adapters: from the model without them).
"""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from colonnade.config import RunConfig, TuneConfig, plural
from colonnade.data import Batch
from colonnade.data.loader import Loader, Objective
from colonnade.errors import DataError
from colonnade.model import Transformer
from colonnade.parallel.axis import Axis
from colonnade.train.data_feed import MakeFeed
from colonnade.train.model_inputs import model_inputs
from colonnade.train.train_step import PipelineStep
from colonnade.tune.chats import Conversation, Conversations, Preference
from colonnade.tune.packing import TuneFeed, pack_rows

SCORING_REPORT_S = 10.0
"""Minimum time between two lines about the scores of the reference model [s]."""


class PreferenceSamples:
    """Pairs: conversations 2i (chosen) and 2i + 1 (rejected)."""

    def __init__(self, data: Conversations, run: RunConfig, tune: TuneConfig, *, fixed_shape: bool):
        self._data, self._sequence, self._fixed_shape = data, run.data.sequence, fixed_shape
        self._loss = (tune.beta, tune.loss, tune.flipped)
        self.samples = len(data) // 2
        """Pairs in one epoch."""
        self.reference: np.ndarray | None = None
        """(pairs, 2) float64; None until the scores exist."""

    def pack(self, samples: np.ndarray, numbers: np.ndarray) -> Batch:
        """The batch of these pairs; without reference scores its loss is that of the log-probabilities alone."""
        rows = [self._data.at(2 * int(i) + side) for i in samples for side in (0, 1)]
        batch = pack_rows(rows, self._sequence, per_sample=2, fixed_shape=self._fixed_shape)
        lengths = [len(tokens) for tokens, _ in rows]
        sequence_T = np.zeros(len(batch.tokens_T), np.int64)  # filling belongs to sequence 0 and has no targets
        sequence_T[: sum(lengths)] = np.repeat(np.arange(len(rows)), lengths)
        known = self.reference is not None
        reference = self.reference[samples].reshape(-1) if self.reference is not None else np.zeros(len(rows))
        return replace(
            batch,
            sequence_T=torch.from_numpy(sequence_T),
            reference_S=torch.from_numpy(reference.astype(np.float64)),
            preference=self._loss if known else None,
        )


class PreferenceFeed(TuneFeed):
    """As :class:`~colonnade.tune.packing.TuneFeed`, with reference scores."""

    def __init__(
        self,
        data: Conversations,
        held_out: Conversations,
        tune: TuneConfig,
        run: RunConfig,
        rank: int = 0,
        ranks: int = 1,
    ):
        parts: list[PreferenceSamples] = []

        def samples(run: RunConfig, validation: bool, fixed_shape: bool) -> Objective:
            part = PreferenceSamples(held_out if validation else data, run, tune, fixed_shape=fixed_shape)
            parts.append(part)
            return part

        identity = {"method": "dpo", "rows": data.sha256, "beta": tune.beta, "loss": tune.loss, "flipped": tune.flipped}
        super().__init__(samples, identity, 2 * data.mean_tokens, len(held_out) // 2, run, rank, ranks)
        self._loaders: list[Loader] = [self.samples, *([self.held_out] if self.held_out is not None else [])]
        self._parts = parts
        self._files = [_file(run, rows) for rows in (data, held_out)[: len(parts)]]

    def needs_start_weights(self, world: Axis) -> bool:
        """Whether a file of scores is missing."""
        missing = not all(self._open(part, file) for part, file in zip(self._parts, self._files, strict=True))
        return bool(world.max_(torch.tensor(int(missing))))

    def prepare(
        self,
        model: Transformer,
        pipeline: PipelineStep | None,
        world: Axis,
        device: torch.device,
        announce: Callable[[str], object],
    ) -> None:
        """Score all pairs with ``model`` and store the scores."""
        for loader, part, file in zip(self._loaders, self._parts, self._files, strict=True):
            part.reference = None
            announce(f"scoring {plural(part.samples, 'pair')} with the reference model, once")
            announced_s = time.monotonic()
            scores = torch.zeros(part.samples, 2, dtype=torch.float64)
            seen = torch.zeros(part.samples, dtype=torch.float64)
            for numbers, batch in loader.all_samples():
                logp_S = _score(model, pipeline, batch.to(device))
                if logp_S is not None:
                    index = torch.from_numpy(numbers)
                    scores[index] = logp_S.double().cpu().view(-1, 2)
                    seen[index] = 1
                if time.monotonic() - announced_s > SCORING_REPORT_S:
                    share = int(numbers[-1] + 1) / part.samples
                    announce(f"scored {share:.0%} of the pairs")
                    announced_s = time.monotonic()
            # Ranks have either the same scores or none: take the mean over those that have them.
            scores, seen = world.sum_(scores * seen[:, None]), world.sum_(seen)
            scores = scores / seen[:, None]
            if not scores.isfinite().all():
                bad = int((~scores.isfinite().all(1)).nonzero()[0])
                raise DataError(
                    f"the reference model gives pair {bad} a probability of 0; remove the pair, or use float32"
                )
            if world.rank == 0:
                _write(file, scores.numpy())
            world.max_(torch.zeros(()))  # wait for the file
            if not self._open(part, file):
                part.reference = scores.numpy()  # a folder that ranks do not share

    def _open(self, part: PreferenceSamples, file: Path) -> bool:
        """Map the scores in ``file``; False if it is missing or damaged."""
        try:
            found = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return False
        if found.shape != (part.samples, 2) or found.dtype != np.float64 or not np.isfinite(found).all():
            return False
        part.reference = found
        return True


@torch.no_grad()
def _score(model: Transformer, pipeline: PipelineStep | None, batch: Batch) -> Tensor | None:
    """logp_S of the batch's sequences; None on pipeline ranks without the last stage."""
    stream, attend, head = model_inputs(batch, model)
    if pipeline is not None:
        return pipeline.forward(batch, head)
    return model(stream, attend, head)


def _file(run: RunConfig, rows: Conversations) -> Path:
    base = "stored" if run.model.lora is None else run.model.lora.base
    parts = (rows.sha256, run.train.pretrained_checkpoint, run.train.dtype, base)
    key = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]
    return run.folder / f"reference-{key}.npy"


def _write(file: Path, scores: np.ndarray) -> None:
    """Writes the file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial_file = file.with_suffix(".partial")
    with partial_file.open("wb") as out:
        np.save(out, scores, allow_pickle=False)
        out.flush()
        os.fsync(out.fileno())
    partial_file.replace(file)


def flatten(pairs: Sequence[Preference]) -> list[Conversation]:
    """Alternates chosen and rejected conversations."""
    return [side for pair in pairs for side in pair]


def preference_feed(data: Conversations, held_out: Conversations, tune: TuneConfig) -> MakeFeed:
    """The data feed of preference tuning; raises :class:`DataError` without pairs."""
    if not len(data):
        raise DataError("there are no pairs; pass at least one")
    return partial(PreferenceFeed, data, held_out, tune)
