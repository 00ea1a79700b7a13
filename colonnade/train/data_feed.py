"""The data of a run: opened, checked against the model, and dealt out to the data ranks.

Made once in the process that starts the others, so that what is wrong is said before they start, and in each of them.
"""

from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, Protocol

from colonnade.config import DataConfig, RunConfig
from colonnade.data import Corpus, Loader, Pairs, Pieces, Tokenizer
from colonnade.data.manifest import SPLITS
from colonnade.errors import ConfigError, DataError

EVAL_EVERY = 100
"""Steps between two validations, where nobody says how many."""


class DataFeed(Protocol):
    """What a session trains on; :class:`CorpusFeed` reads a corpus, :mod:`colonnade.tune` labelled examples."""

    samples: Loader
    name: str
    """What the data is called in messages."""
    sample_tokens: float
    """Tokens of a sample, on average."""
    eval_every: int
    """Steps between two validations; 0: never."""
    held_out: Loader | None
    """For validation; None where :attr:`eval_every` is 0."""
    no_validation_reason: str | None
    """Why there is no validation, when nobody said so."""

    @property
    def corpus(self) -> Corpus | None:
        """Where samples are made of text: its corpus."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Saved with each checkpoint."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """What the data is, for a checkpoint's data cursor and for the ranks to agree on."""
        ...

    def difference(self, was: Mapping[str, Any]) -> str | None:
        """What differs from the :attr:`identity` in a checkpoint's cursor, if anything does that is trained on."""
        ...


MakeFeed = Callable[[RunConfig, int, int], DataFeed]
"""(run, data rank, data ranks) to the samples of that rank. Sent to other processes, so no lambda."""


def check_data_unchanged(feed: DataFeed, data: DataConfig, was: Mapping[str, Any], checkpoint: str) -> list[str]:
    """How the samples differ from those of the cursor ``was`` of ``checkpoint``.

    Raises :class:`DataError` or :class:`ConfigError` for a difference after which samples would come again or never,
    unless data.restart says that the data starts anew.
    """
    anew = "start the data anew with --data.restart, or use another run name"
    found: list[str] = []
    if what := feed.difference(was):
        found.append(f"{feed.name} is not the data that {checkpoint} was trained on: {what}")
        if not data.restart:
            raise DataError(f"{found[-1]}; use that one, {anew}")
    for key in ("sequence", "seed"):
        if was.get(key) != (now := getattr(data, key)):
            found.append(f"data.{key} is {now}, and {checkpoint} was trained with {was.get(key)}")
            if not data.restart:
                raise ConfigError(
                    f"{found[-1]}: samples would come again or never; set --data.{key} {was.get(key)}, {anew}"
                )
    return found


class CorpusFeed:
    """The samples of a corpus, of data rank ``rank`` of ``ranks``.

    Raises :class:`DataError` for a folder that is no corpus and for too little text, :class:`ConfigError` for one whose
    vocabulary or tasks the model does not have.
    """

    def __init__(self, run: RunConfig, rank: int = 0, ranks: int = 1):
        if not (run.model.causal or run.model.predicts_masked):
            raise ConfigError(
                f"a model with top = '{run.model.top}' predicts no tokens, so it cannot be trained on text; set "
                "--model.top pretraining, or fine-tune it with colonnade.tune"
            )
        self.name = str(run.data.path)
        self.sample_tokens: float = run.data.sequence
        self.corpus: Corpus = Corpus(run.data.path)
        self.tokenizer = self.corpus.tokenizer if self.corpus.has_tokenizer else None
        needs, has = self.corpus.manifest.vocab_size, run.model.vocab_size
        if needs > has:
            remedy = f"set --model.vocab_size {needs}"
            if run.train.start:  # whose vocabulary is what it is
                remedy = f"make it again with colonnade corpus … --tokenizer {run.train.start}"
            raise ConfigError(f"{run.data.path} has a vocabulary of {needs} tokens, the model of {has}; {remedy}")

        self._check_tasks(run)

        def loader(split: str) -> Loader:
            part, t = self.corpus.split(split), run.train
            objective = None if run.model.causal else Pairs(part, run.data, Pieces.of(self.corpus.tokenizer))
            return Loader(part, run.data, t.batch, t.micro_batch, rank, ranks, objective)

        self.samples = loader("train")
        held_out, every = self.corpus.manifest.validation.tokens, run.train.eval_every
        self.no_validation_reason: str | None = None
        """Why there is no validation, when nobody said so."""
        if every is None and held_out <= run.data.sequence:
            self.no_validation_reason = (
                f"{run.data.path} holds out {held_out:,} tokens, and a sample takes {run.data.sequence + 1:,}"
            )
        self.eval_every = 0 if self.no_validation_reason else EVAL_EVERY if every is None else every
        """Steps between two validations; 0: never."""
        self.held_out = loader("validation") if self.eval_every else None

    @property
    def identity(self) -> dict[str, Any]:
        """The corpus that the samples are made of."""
        return {"corpus": self.corpus.manifest.fingerprint}

    def difference(self, was: Mapping[str, Any]) -> str | None:
        """What of the training text differs from a checkpoint's."""
        return _difference(was.get("corpus"), self.corpus.manifest.fingerprint)

    def _check_tasks(self, run: RunConfig) -> None:
        """A router that decides by tasks needs a corpus that has some, and a row in its table for each."""
        moe, tasks = run.model.moe, self.corpus.manifest.tasks
        if moe is None or moe.router.kind != "task":
            return
        if not run.model.causal:
            raise ConfigError("router 'task' is for decoders: pairs of segments carry no tasks; use another router")
        if moe.balance == "sequence":
            raise ConfigError(
                "router 'task' decides by tasks, and balance 'sequence' counts by sequences: a stream says one of the "
                "two; set --model.moe.balance switch"
            )
        if tasks is None and moe.router.task is None:
            raise ConfigError(
                f"router 'task' needs to know what task a document is of, and {run.data.path} does not say; build it "
                "with: colonnade corpus FILES --tasks source (or field:NAME)"
            )
        if tasks is not None and len(tasks) > moe.router.tasks:
            raise ConfigError(
                f"{run.data.path} has {len(tasks)} tasks and the router {moe.router.tasks}; set "
                f"--model.moe.router.tasks {len(tasks)}"
            )


def _difference(was: Any, now: Mapping[str, Any]) -> str | None:
    """What of a corpus's training part differs from an earlier fingerprint, if anything does."""
    train = SPLITS[0]
    if not isinstance(was, dict) or was.keys() != now.keys() or was[train].keys() != now[train].keys():
        return "the checkpoint does not say which one that was"
    old, new = was[train], now[train]
    if was["tokenizer"] != now["tokenizer"]:
        return "it has another tokenizer"
    for what in ("tokens", "documents"):
        if old[what] != new[what]:
            return f"it has {new[what]:,} {what} to train on, and not {old[what]:,}"
    if old["shards"] != new["shards"]:
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old["shards"], new["shards"], strict=False))
        )
        return (
            f"shard {same} of {len(new['shards'])} holds other tokens, such as those of the same documents in another "
            "order"
        )
    if old["document_ends"] != new["document_ends"]:
        return "its documents end elsewhere"
    return None if old["tasks"] == new["tasks"] else "its documents have other tasks"
