"""Fine-tunes a model on conversations, preferences, rewards or text pairs, with the training loop of
:mod:`colonnade.train`.

    run = tuned_run("smollm2", name="pirate", lora=LoraConfig(rank=16))
    Tuner(run, "chats.jsonl", method="sft").fit()

Plans, precision, checkpoints, resuming and trackers are those of training. A step's loss is (global sum) / (global
count) over all ranks and micro-batches, counted before the first backward pass.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from colonnade.checkpoint.load_model import open_model
from colonnade.config import DataConfig, LoraConfig, RunConfig, TrainConfig, TuneConfig, did_you_mean
from colonnade.config.tune import check_method_settings
from colonnade.data import Tokenizer
from colonnade.errors import ConfigError, DataError
from colonnade.train.data_feed import MakeFeed
from colonnade.train.loop import Trainer
from colonnade.train.run_log import Summary
from colonnade.train.trackers import OpenTracker
from colonnade.tune.chats import (
    Conversation,
    Conversations,
    Report,
    conversation,
    encode_prompt,
    fit_conversation,
    preference,
    read_rows,
)
from colonnade.tune.embed import check_same_texts, embed_feed, read_texts, resolve_contrast
from colonnade.tune.packing import check_tune_settings, sft_feed
from colonnade.tune.preferences import preference_feed

SEQUENCE = 1024
"""Default maximum length of a conversation [tokens], unless the model's context is shorter."""


def tuned_run(model: str | Path, *, lora: LoraConfig | None = None, sequence: int = 0, **settings: Any) -> RunConfig:
    """The settings of a run that fine-tunes ``model`` (anything that load takes), with adapters if ``lora`` is given.

    ``sequence`` is the longest conversation [tokens] (0: :data:`SEQUENCE`, or the model's context); ``settings`` are
    other fields of :class:`RunConfig`. Raises :class:`CheckpointError` if there is no such model.
    """
    config = open_model(model).config
    if sequence > config.context:
        raise ConfigError(
            f"sequence {sequence:,} is longer than the context of {model}, {config.context:,}; shorten it"
        )
    data = DataConfig(sequence=sequence or min(SEQUENCE, config.context))
    train = settings.pop("train", TrainConfig())
    if train.pretrained_checkpoint not in ("", str(model)):
        raise ConfigError(
            f"train.pretrained_checkpoint {train.pretrained_checkpoint} is not the model {model} to fine-tune; remove "
            "it"
        )
    train = train.replace(pretrained_checkpoint=str(model))
    settings = {"name": "tuned", **settings}
    return RunConfig(model=config.replace(lora=lora), data=data, train=train, **settings)


class Data(NamedTuple):
    """The data of a method, read from its files."""

    feed: MakeFeed
    rows: int


class DataSource(NamedTuple):
    """The source of a method's data."""

    run: RunConfig
    tune: TuneConfig
    data: str | Path
    held_out: str | Path | None
    tokenizer: Tokenizer
    report: Report


ReadData = Callable[[DataSource], Data]


def _sft(source: DataSource) -> Data:
    run, tune, data, held_out, tokenizer, report = source

    def read(path: str | Path) -> Conversations:
        longest, V = run.data.sequence, run.model.vocab_size
        return Conversations(
            [fit_conversation(conversation(row, tokenizer, where), longest, V, where, truncate=tune.truncate)
             for where, row in read_rows(path, report)]
        )  # fmt: skip

    rows = read(data)
    if not len(rows):
        raise DataError(f"{data} has no rows; write one conversation per line")
    return Data(sft_feed(rows, Conversations([]) if held_out is None else read(held_out)), len(rows))


def _dpo(source: DataSource) -> Data:
    run, tune, data, held_out, tokenizer, report = source

    def read(path: str | Path) -> Conversations:
        longest, V = run.data.sequence, run.model.vocab_size
        sides: list[Conversation] = []
        for where, row in read_rows(path, report):
            chosen, rejected = (
                fit_conversation(side, longest, V, where, truncate=tune.truncate)
                for side in preference(row, tokenizer, where)
            )
            if chosen == rejected:  # their gradients would cancel
                raise DataError(
                    f"{where} has the same first {longest:,} tokens in 'chosen' and 'rejected'; raise --sequence, or "
                    "remove the row"
                )
            sides += chosen, rejected
        return Conversations(sides)

    rows = read(data)
    if not len(rows):
        raise DataError(f"{data} has no rows; write one preference per line")
    feed = preference_feed(rows, Conversations([]) if held_out is None else read(held_out), tune)
    return Data(feed, len(rows) // 2)


def _grpo(source: DataSource) -> Data:
    run, tune, data, held_out, tokenizer, report = source
    from colonnade.reward_worker import load_reward
    from colonnade.tune.grpo import PromptRow, check_reward_settings, reward_feed  # imports the engine

    if held_out is not None:
        raise ConfigError("--held_out does not apply to grpo, which logs the rewards of new completions; remove it")
    check_reward_settings(run, tune)
    load_reward(tune.reward)  # before the rows are read, which may take long
    rows: list[PromptRow] = []
    for where, row in read_rows(data, report):
        if "prompt" not in row:
            raise DataError(f"{where} has no 'prompt'; write a string or a list of messages")
        tokens = encode_prompt(row["prompt"], tokenizer, where)
        rows.append(PromptRow(tokens, tokenizer.decode(tokens), row, where))
    return Data(reward_feed(rows, tune, run), len(rows) * tune.group)


def _embed(source: DataSource) -> Data:
    run, tune, data, held_out, tokenizer, report = source
    rows, texts = read_texts(data, tokenizer, run, truncate=tune.truncate, report=report)
    others, count = Conversations([]), texts
    if held_out is not None:
        others, count = read_texts(held_out, tokenizer, run, truncate=tune.truncate, report=report)
    check_same_texts((texts, count), str(held_out))
    contrast = resolve_contrast(run.model, tune, texts)
    return Data(embed_feed(rows, others, contrast), len(rows) // max(1, texts))


METHODS: dict[str, ReadData] = {"sft": _sft, "dpo": _dpo, "grpo": _grpo, "embed": _embed}
"""Method names to the functions that read their data."""


def log_interval(method: str, steps: int) -> int:
    """Steps between two lines of metrics: 1 in short runs and where completions are sampled, at most 10."""
    return 1 if method == "grpo" else min(10, max(1, steps // 20))


class Tuner:
    """Fine-tunes ``run`` on a file, resuming from its newest checkpoint: ``Tuner(run, "chats.jsonl").fit()``."""

    def __init__(
        self,
        run: RunConfig,
        data: str | Path,
        method: str = "sft",
        tune: TuneConfig | None = None,
        *,
        held_out: str | Path | None = None,
        set_steps: bool = False,
        set_log_every: bool = False,
        report: Report = lambda _line: None,
        trackers: Sequence[OpenTracker] = (),
        methods: Mapping[str, ReadData] = METHODS,
    ):
        """``held_out`` is a file in the same format for validation. ``set_steps`` replaces ``train.steps`` with
        ``tune.epochs`` passes over the data, ``set_log_every`` ``train.log_every`` by :func:`log_interval`. ``report``
        receives lines about the rows that are read.

        Raises :class:`~colonnade.errors.ColonnadeError` for settings, rows or a model that do not fit.
        """
        if method not in methods:
            raise ConfigError(f"method {method} is unknown{did_you_mean(method, list(methods))}")
        tune = tune or TuneConfig()
        check_method_settings(method, tune.model_dump(exclude_defaults=True))
        check_tune_settings(run, generates=method != "embed")
        tokenizer = _tokenizer(run.train.pretrained_checkpoint)
        self.data = methods[method](DataSource(run, tune, data, held_out, tokenizer, report))
        if set_steps:
            steps = max(1, math.ceil(tune.epochs * self.data.rows / run.train.batch))
            run = run.replace(train=run.train.replace(steps=steps))
        if set_log_every:
            run = run.replace(train=run.train.replace(log_every=log_interval(method, run.train.steps)))
        self.trainer = Trainer(run, trackers, self.data.feed)
        self.run = self.trainer.run

    def fit(self) -> Summary:
        """Train; see :meth:`colonnade.train.loop.Trainer.fit`."""
        return self.trainer.fit()


def _tokenizer(model: str) -> Tokenizer:
    tokenizer = Tokenizer.from_model(open_model(model).tokenizer_source)
    if tokenizer is None:
        raise DataError(f"{model} has no tokenizer, but conversations are text; use a model with one")
    return tokenizer
