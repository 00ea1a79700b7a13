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
    vocabulary the model does not have.
    """

    def __init__(self, run: RunConfig, rank: int = 0, ranks: int = 1):
        self.corpus = Corpus(run.data.path)
        needs, has = self.corpus.manifest.vocab_size, run.model.vocab_size
        if needs > has:
            raise ConfigError(
                f"{run.data.path} has a vocabulary of {needs} tokens, the model of {has}; "
                f"set --model.vocab_size {needs}"
            )

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
