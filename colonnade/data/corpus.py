"""A corpus folder, opened for reading. :func:`build` writes one; :mod:`~colonnade.data.manifest` draws what is
inside.
"""

import functools
from pathlib import Path

from colonnade.data.corpus_builder import build
from colonnade.data.manifest import SPLITS, Manifest, sha256_of
from colonnade.data.shards import Split
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError

__all__ = ["Corpus", "build"]


class Corpus:
    """A corpus folder, opened; ``verify`` also reads every byte and compares checksums.

    Raises :class:`DataError` for a folder that is not a corpus, and for a file that is missing, cut short or (with
    ``verify``) changed.
    """

    def __init__(self, path: str | Path, verify: bool = False):
        self.path = Path(path)
        self.manifest = Manifest.load(self.path)
        dtype, records = self.manifest.numpy_dtype, (self.manifest.train, self.manifest.validation)
        self._splits = {
            name: Split(self.path, name, record, dtype) for name, record in zip(SPLITS, records, strict=True)
        }
        if verify:
            if self.has_tokenizer:
                self._verify_tokenizer()
            for split in self._splits.values():
                split.verify()

    def split(self, name: str) -> Split:
        """The "train" or the "validation" part; raises :class:`DataError` when it is empty or has another name."""
        if name not in self._splits:
            raise DataError(f"{self.path} has no split '{name}'; choose one of {', '.join(self._splits)}")
        split = self._splits[name]
        if not split.tokens:
            raise DataError(
                f"{self.path} has no {name} documents (its validation_share is {self.manifest.validation_share:g}); "
                "build it with another share, or switch validation off (--train.eval_every 0)"
            )
        return split

    @property
    def has_tokenizer(self) -> bool:
        """False for tokens that were given without one (:func:`colonnade.data.write_tokens`)."""
        return self.manifest.tokenizer_sha256 is not None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens; raises :class:`DataError` for none, and for a file that has changed."""
        if not self.has_tokenizer:
            raise DataError(f"{self.path} holds tokens without a tokenizer; give it too: Trainer(…, tokenizer=…)")
        self._verify_tokenizer()
        return Tokenizer.from_file(self.path / "tokenizer")

    def _verify_tokenizer(self) -> None:
        file = self.path / "tokenizer" / "tokenizer.json"
        if not file.is_file():
            raise DataError(f"{file} is missing; copy the corpus again, or build it again")
        if sha256_of(file) != self.manifest.tokenizer_sha256:
            raise DataError(f"{file} is not the one that made these tokens; copy it again, or build the corpus again")
