"""Opens a run's data, checks it against the model, and divides it among the data ranks.

This happens once in the launching process, so that errors appear before any worker starts, and again in each worker.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from colonnade.config import DataConfig, RunConfig
from colonnade.data import Batch, Corpus, Loader, MaskingVocabulary, SentencePairs, Tokenizer
from colonnade.data.manifest import SPLITS
from colonnade.data.pairs import Pairs, SpanCorruption
from colonnade.errors import ConfigError, DataError

EVAL_EVERY = 100
"""Default steps between two validations."""


class StepSamples(Protocol):
    """The samples of each step (:class:`~colonnade.data.Loader`)."""

    samples: int
    """Samples in one epoch."""

    def at(self, seen: int) -> list[Batch]:
        """This rank's micro-batches of the step after ``seen`` samples, counted over all ranks."""
        ...

    def numbers(self, seen: int) -> list[int]:
        """The sample numbers of all ranks of that step."""
        ...


class DataFeed(Protocol):
    """The samples of a run: of a corpus (:class:`CorpusFeed`) or labelled examples (:mod:`colonnade.tune`)."""

    name: str
    """Name of the data in messages."""
    sample_tokens: float
    """Mean tokens per sample."""
    eval_every: int
    """Steps between two validations; 0: never."""
    no_validation_reason: str | None
    """Why there is no validation although the settings do not exclude it."""

    @property
    def samples(self) -> StepSamples:
        """The samples of each step."""
        ...

    @property
    def held_out(self) -> Loader | None:
        """Held-out samples; None where :attr:`eval_every` is 0."""
        ...

    @property
    def corpus(self) -> Corpus | None:
        """The corpus of samples made from text."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Saved with each checkpoint."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """Fingerprint of the data, for a checkpoint's data cursor and for comparison between ranks."""
        ...

    def difference(self, old: Mapping[str, Any]) -> str | None:
        """How the training data differs from the :attr:`identity` ``old`` in a checkpoint's cursor, if at all."""
        ...


MakeFeed = Callable[[RunConfig, int, int], DataFeed]
"""(run, data rank, data ranks) -> the samples of that rank. Sent to other processes, so no lambda."""


@dataclass(frozen=True)
class VaryingFeed:
    """A :data:`MakeFeed` with micro-batches of different shapes, so that blocks are not compiled by default."""

    make: MakeFeed

    def __call__(self, run: RunConfig, rank: int, ranks: int) -> DataFeed:
        """The samples of data rank ``rank``."""
        return self.make(run, rank, ranks)

    @staticmethod
    def with_compile_default(run: RunConfig, feed: MakeFeed) -> RunConfig:
        """``run`` with the default of train.compile for ``feed``."""
        if run.train.compile is None and isinstance(feed, VaryingFeed):
            return run.replace(train=run.train.replace(compile=False))
        return run


def check_data_unchanged(feed: DataFeed, data: DataConfig, old: Mapping[str, Any], checkpoint: str) -> list[str]:
    """How the samples differ from those of the data cursor ``old`` of ``checkpoint``.

    Raises :class:`DataError` or :class:`ConfigError` for a difference that would repeat or skip samples, unless
    data.restart allows restarting the data.
    """
    remedy, flags = "restart the data with --data.restart, or use another run name", "--data."
    if "method" in feed.identity:  # of the verb finetune
        remedy, flags = "or use another run name", "--"
    changes: list[str] = []
    if difference := feed.difference(old):
        changes.append(f"{feed.name} is not the data that {checkpoint} was trained on: {difference}")
        if not data.restart:
            raise DataError(f"{changes[-1]}; use that one, {remedy}")
    for key in ("sequence", "seed"):
        if old.get(key) != (new := getattr(data, key)):
            changes.append(f"data.{key} is {new}, but {checkpoint} was trained with {old.get(key)}")
            if not data.restart:
                raise ConfigError(
                    f"{changes[-1]}: samples would be repeated or skipped; set {flags}{key} {old.get(key)}, {remedy}"
                )
    return changes


class CorpusFeed:
    """The samples of a corpus for data rank ``rank`` of ``ranks``.

    Raises :class:`DataError` for a folder without a corpus and for too little text, :class:`ConfigError` if the model
    lacks the corpus's vocabulary or tasks.
    """

    def __init__(self, run: RunConfig, rank: int = 0, ranks: int = 1):
        if not (run.model.causal or run.model.predicts_masked):
            raise ConfigError(
                f"a model with task_head = '{run.model.task_head}' predicts no tokens, so it cannot be "
                f"trained on text; set "
                "--model.task_head pretraining, or fine-tune it with colonnade.tune"
            )
        self.name = str(run.data.path)
        self.sample_tokens: float = run.data.sequence
        self.corpus: Corpus = Corpus(run.data.path)
        self.tokenizer = self.corpus.tokenizer if self.corpus.has_tokenizer else None
        corpus_vocab, model_vocab = self.corpus.manifest.vocab_size, run.model.vocab_size
        if corpus_vocab > model_vocab:
            remedy = f"set --model.vocab_size {corpus_vocab}"
            if run.train.pretrained_checkpoint:  # its vocabulary cannot change
                remedy = f"rebuild it with colonnade corpus … --tokenizer {run.train.pretrained_checkpoint}"
            raise ConfigError(
                f"{run.data.path} has a vocabulary of {corpus_vocab} tokens, the model of {model_vocab}; {remedy}"
            )
        self._check_tasks(run)
        self._check_objective(run)

        def loader(split: str) -> Loader:
            part, t = self.corpus.split(split), run.train
            objective = None
            if (encoder := run.model.encoder) is not None:
                tokenizer = self.corpus.tokenizer
                if self.corpus.manifest.objective == "pairs":
                    objective = Pairs(part, run.data, tokenizer.eos_ids[0], encoder.start_token)
                else:
                    objective = SpanCorruption(part, run.data, tokenizer, encoder.start_token)
            elif not run.model.causal:
                objective = SentencePairs(part, run.data, MaskingVocabulary.of(self.corpus.tokenizer))
            return Loader(part, run.data, t.batch, t.micro_batch, rank, ranks, objective)

        self.samples = loader("train")
        held_out, every = self.corpus.manifest.validation.tokens, run.train.eval_every
        self.no_validation_reason: str | None = None
        if every is None and held_out <= run.data.sequence:
            self.no_validation_reason = (
                f"{run.data.path} holds out {held_out:,} tokens, but a sample needs {run.data.sequence + 1:,}"
            )
        self.eval_every = 0 if self.no_validation_reason else EVAL_EVERY if every is None else every
        self.held_out = loader("validation") if self.eval_every else None

    @property
    def identity(self) -> dict[str, Any]:
        """Fingerprint of the corpus."""
        return {"corpus": self.corpus.manifest.fingerprint}

    def difference(self, old: Mapping[str, Any]) -> str | None:
        """How the training text differs from a checkpoint's, if at all."""
        return _corpus_difference(old.get("corpus"), self.corpus.manifest.fingerprint)

    def _check_objective(self, run: RunConfig) -> None:
        """Check that the corpus is for this kind of model."""
        objective, encoder = self.corpus.manifest.objective, run.model.encoder
        if encoder is None and objective == "pairs":
            raise ConfigError(
                f"{run.data.path} has source–target pairs, but this model has no encoder; train one with "
                "--model.encoder.layers, or build the corpus without --objective pairs"
            )
        if encoder is not None and objective == "text":
            raise ConfigError(
                f"{run.data.path} has plain text, but an encoder–decoder trains on pairs or corrupted spans; build "
                "it with: colonnade corpus FILES --objective spans (or pairs)"
            )
        named = self.corpus.manifest.languages
        if encoder is not None and objective == "pairs" and encoder.languages != (named is not None):
            raise ConfigError(
                f"{run.data.path} has pairs of {'named' if named else 'no named'} languages, and this model translates "
                f"between {'named' if encoder.languages else 'no named'} ones; "
                + ("build the corpus with --languages SOURCE,TARGET" if encoder.languages else
                   "set --model.encoder.languages true, or build the corpus without --languages")
            )  # fmt: skip
        if encoder is not None and encoder.reads == "audio":
            raise ConfigError("training an audio encoder on a corpus is not implemented; load a trained one")
        if encoder is not None and run.data.sequence > encoder.context:
            raise ConfigError(
                f"data.sequence {run.data.sequence} is longer than the encoder's context {encoder.context}; set "
                f"--data.sequence {encoder.context} or --model.encoder.context {run.data.sequence}"
            )

    def _check_tasks(self, run: RunConfig) -> None:
        """Check that the corpus has tasks for a task router, and that its table has a row for each."""
        moe, tasks = run.model.moe, self.corpus.manifest.tasks
        if moe is None or moe.router.kind != "task":
            return
        if not run.model.causal:
            raise ConfigError("router 'task' is for decoders: segment pairs have no tasks; use another router")
        if moe.balance == "sequence":
            raise ConfigError(
                "router 'task' groups tokens by task, and balance 'sequence' groups them by sequence; a stream has "
                "only one grouping; set --model.moe.balance switch"
            )
        if tasks is None and moe.router.task is None:
            raise ConfigError(
                f"router 'task' needs the task of each document, but {run.data.path} has none; build it with: "
                "colonnade corpus FILES --tasks source (or field:NAME)"
            )
        if tasks is not None and len(tasks) > moe.router.tasks:
            raise ConfigError(
                f"{run.data.path} has {len(tasks)} tasks and the router {moe.router.tasks}; set "
                f"--model.moe.router.tasks {len(tasks)}"
            )


def _corpus_difference(old: Any, new: Mapping[str, Any]) -> str | None:
    """How a corpus's training split differs from that of an earlier fingerprint, if at all."""
    train = SPLITS[0]
    if not isinstance(old, dict) or old.keys() != new.keys() or old[train].keys() != new[train].keys():
        return "the checkpoint does not identify its data"
    was, now = old[train], new[train]
    if old["tokenizer"] != new["tokenizer"]:
        return "it has a different tokenizer"
    for what in ("tokens", "documents"):
        if was[what] != now[what]:
            return f"it has {now[what]:,} {what} to train on, not {was[what]:,}"
    if was["shards"] != now["shards"]:
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(was["shards"], now["shards"], strict=False))
        )
        return (
            f"shard {same} of {len(now['shards'])} has different tokens, perhaps the same documents in a different "
            "order"
        )
    if was["document_ends"] != now["document_ends"]:
        return "its documents have different boundaries"
    return None if was["tasks"] == now["tasks"] else "its documents have different tasks"
