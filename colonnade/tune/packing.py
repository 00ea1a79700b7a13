"""Packs conversations into one stream, in which no conversation attends to another.

A sample is one row of the data: a conversation, or several that belong together (a preference's two). There is no
padding, unless all micro-batches need the same shape (pipelines, torch.compile): then a micro-batch is filled up to
``data.sequence`` tokens per conversation with sequences that have no targets.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from colonnade.config import DataConfig, RunConfig
from colonnade.data import Batch, Loader
from colonnade.data.batch import cumulative_lengths
from colonnade.data.loader import Objective
from colonnade.errors import ConfigError, DataError
from colonnade.model import IGNORE
from colonnade.train.data_feed import EVAL_EVERY, MakeFeed
from colonnade.tune.chats import Conversations
from colonnade.tune.classify import start_tokenizer

Row = tuple[np.ndarray, np.ndarray]
"""Tokens, and whether each counts."""


def pack_rows(rows: Sequence[Row], sequence: int, *, per_sample: int = 1, fixed_shape: bool = False) -> Batch:
    """The batch of conversations ``rows``, ``per_sample`` of them per sample; the target of a token is the next
    token.
    """
    lengths = [len(tokens) for tokens, _ in rows]
    first = np.cumsum([0, *lengths])[:-1]
    rest = len(rows) * sequence - sum(lengths) if fixed_shape else 0
    lengths += [min(sequence, rest - start) for start in range(0, rest, sequence)]
    tokens = np.concatenate([*(tokens for tokens, _ in rows), np.zeros(rest, np.int64)])
    counts = np.concatenate([*(counts for _, counts in rows), np.zeros(rest + 1, np.bool_)])
    counts[first] = False  # a conversation's last token has no target
    targets = np.where(counts[1:], np.append(tokens[1:], 0), IGNORE)
    longest = sequence if fixed_shape else max(lengths)
    equal = set(lengths) == {longest}
    return Batch(
        tokens_T=torch.from_numpy(tokens),
        positions_T=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
        targets_T=torch.from_numpy(targets),
        cu_seqlens=cumulative_lengths(lengths, padded=not equal),
        longest=longest,
        equal=equal,
        # Only rows with a target are multiplied by the vocabulary.
        predicted_R=None if fixed_shape else torch.from_numpy(np.flatnonzero(counts[1:])),
        first_R=torch.from_numpy(np.ascontiguousarray(first[::per_sample])),
        stride=sequence * per_sample,
    )


class ConversationSamples:
    """The samples of supervised fine-tuning."""

    def __init__(self, data: Conversations, config: DataConfig, *, fixed_shape: bool):
        self._data, self._sequence, self._fixed_shape = data, config.sequence, fixed_shape
        self.samples = len(data)
        """Samples in one epoch."""

    def pack(self, samples: np.ndarray, numbers: np.ndarray) -> Batch:
        """The batch of these conversations; uses no random numbers."""
        rows = [self._data.at(int(i)) for i in samples]
        return pack_rows(rows, self._sequence, fixed_shape=self._fixed_shape)


MakeSamples = Callable[[RunConfig, bool, bool], Objective]
"""(run, held out, fixed shape) -> samples."""


class TuneFeed:
    """The samples of data rank ``rank`` of ``ranks``; see :class:`colonnade.train.data_feed.DataFeed`.

    ``identity`` describes data and method for the checkpoint's cursor. Raises :class:`ConfigError` for settings that do
    not apply to fine-tuning.
    """

    generates = True
    """Whether the model must generate text."""

    def __init__(
        self,
        samples: MakeSamples,
        identity: Mapping[str, Any],
        mean_tokens: float,
        held_out: int,
        run: RunConfig,
        rank: int = 0,
        ranks: int = 1,
    ):
        self.name, self.corpus, self.sample_tokens = "this data", None, mean_tokens
        self.identity, fixed_shape = dict(identity), check_tune_settings(run, generates=self.generates)
        self.tokenizer = start_tokenizer(run)

        def loader(*, validation: bool) -> Loader:
            t = run.train
            objective = samples(run, validation, fixed_shape)
            return Loader(None, run.data, t.batch, t.micro_batch, rank, ranks, objective)

        self.samples, every = loader(validation=False), run.train.eval_every
        if every and not held_out:
            raise DataError(
                f"train.eval_every is {every}, but no rows are held out; pass a file with --held_out, or unset "
                "train.eval_every"
            )
        self.no_validation_reason = "no rows are held out" if every is None and not held_out else None
        self.eval_every = 0 if self.no_validation_reason else EVAL_EVERY if every is None else every
        self.held_out = loader(validation=True) if self.eval_every else None

    def difference(self, old: Mapping[str, Any]) -> str | None:
        """How data or method differ from a checkpoint's, if at all."""
        for key, value in self.identity.items():
            if (was := old.get(key)) != value:
                if key == "rows":
                    return "it has different rows, or a different order"
                return f"{key} is {value}, and was {was}"
        return None


def check_tune_settings(run: RunConfig, *, generates: bool = True) -> bool:
    """Raise :class:`ConfigError` for settings that do not apply to fine-tuning on conversations.

    Returns whether all micro-batches must have the same shape.
    """
    t, defaults = run.train, DataConfig()
    if generates and not run.model.causal:
        raise ConfigError(
            "conversations need a model that generates text, but this one is an encoder; use another model"
        )
    for name in ("path", "separate_documents", "mask_share", "mask_ngram", "short_seq_prob"):
        if (value := getattr(run.data, name)) != (default := getattr(defaults, name)):
            raise ConfigError(f"data.{name} is {value}, but applies only to text in a corpus; set it to {default}")
    if run.model.moe is not None and run.model.moe.router.kind == "task":
        raise ConfigError("router 'task' needs the task of each token, but conversations have none; use another router")
    needs_fixed_shape = {"plan.pp": run.plan.pp > 1, "train.compile": t.compile, "train.cuda_graph": t.cuda_graph,
             "train.recompute budget": t.recompute == "budget"}  # fmt: skip
    reasons = [name for name, applies in needs_fixed_shape.items() if applies]
    if reasons and run.model.moe is not None:
        raise ConfigError(
            f"{reasons[0]} needs micro-batches of one shape, and experts would be balanced over the padding; remove "
            "it, or fine-tune a dense model"
        )
    return bool(reasons)


def _conversation_samples(
    data: Conversations, held_out: Conversations, run: RunConfig, validation: bool, fixed_shape: bool
) -> Objective:
    return ConversationSamples(held_out if validation else data, run.data, fixed_shape=fixed_shape)


def sft_feed(data: Conversations, held_out: Conversations) -> MakeFeed:
    """The data feed of supervised fine-tuning; raises :class:`DataError` without conversations."""
    if not len(data):
        raise DataError("there are no conversations; pass at least one")
    samples = partial(_conversation_samples, data, held_out)
    identity = {"method": "sft", "rows": data.sha256}
    return partial(TuneFeed, samples, identity, data.mean_tokens, len(held_out))
