"""The corpus as a run reads it: opened, checked against the model, and dealt out to the data ranks.

Made once in the process that starts the others, so that what is wrong is said before they start, and in each of them.
"""

from colonnade.config import RunConfig
from colonnade.data import Corpus, Loader, Pairs, Pieces
from colonnade.errors import ConfigError

EVAL_EVERY = 100
"""Steps between two validations, where nobody says how many."""


class Feed:
    """The samples of data rank ``rank`` of ``ranks``.

    Raises :class:`DataError` for a folder that is no corpus and for too little text, :class:`ConfigError` for one whose
    vocabulary or tasks the model does not have.
    """

    def __init__(self, run: RunConfig, rank: int = 0, ranks: int = 1):
        self.corpus = Corpus(run.data.path)
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
        self.why_off: str | None = None
        """Why there is no validation, when nobody said so."""
        if every is None and held_out <= run.data.sequence:
            self.why_off = (
                f"{run.data.path} holds out {held_out:,} tokens, and a sample takes {run.data.sequence + 1:,}"
            )
        self.eval_every = 0 if self.why_off else EVAL_EVERY if every is None else every
        """Steps between two validations; 0: never."""
        self.held_out = loader("validation") if self.eval_every else None

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
