"""The manifest of a corpus folder: its files, sizes and checksums.

    corpus/
      manifest.json               this record
      tokenizer/                  tokenizer.json, tokenizer_config.json
      train-00000.bin ...         token ids, little-endian uint16 or uint32, every shard but the last of the same size
      train.documents.bin         int64: end of each document in the split's stream of tokens, after its end token
      train.tasks.bin             uint16: each document's task, if documents have tasks
      validation-00000.bin ...    the same

Equal sources and settings give a byte-identical folder; it contains no dates or paths.
"""

import hashlib
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from colonnade.errors import DataError

MANIFEST = "manifest.json"
FORMAT: Literal["colonnade-corpus"] = "colonnade-corpus"
SPLITS = ("train", "validation")

Count = Field(ge=0)
Sha256 = Field(pattern=r"^[0-9a-f]{64}$")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(_Record):
    """One file of tokens."""

    file: str = Field(pattern=r"^(train|validation)-\d{5,}\.bin$")
    tokens: int = Count
    documents: int = Count
    """Documents that end in it."""
    sha256: str = Sha256


class SplitRecord(_Record):
    """The train or the validation split."""

    tokens: int = Count
    documents: int = Count
    documents_sha256: str = Sha256
    tasks_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """None: documents have no tasks."""
    shards: tuple[Shard, ...]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Sizes and checksums of its files, as plain values."""
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "shards": [shard.sha256 for shard in self.shards],
            "document_ends": self.documents_sha256,
            "tasks": self.tasks_sha256,
        }

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        sizes = [shard.tokens for shard in self.shards]
        if sum(sizes) != self.tokens or len(set(sizes[:-1])) > 1 or sizes[-1:] > sizes[:1] or 0 in sizes:
            raise ValueError(f"shards of {sizes} tokens are not equal ones and a rest that add up to {self.tokens}")
        return self


class Manifest(_Record):
    """The record of a whole corpus."""

    format: Literal["colonnade-corpus"] = FORMAT
    version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(gt=0)
    end_id: int | None = Field(default=None, ge=0)
    """The token after each document; None: the data came as tokens."""
    tokenizer_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """None: the data came as tokens without a tokenizer."""
    validation_share: float = Field(ge=0, lt=1)
    spans: int | None = Field(default=None, gt=0)
    """For a corpus of one document: number of held-out spans, each of which is stored as a document."""
    source_bytes: int = Count
    tasks: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of the tasks, by number; None: documents have no tasks."""
    objective: Literal["text", "spans", "pairs"] = "text"
    """text: documents. spans: documents, with sentinels in the vocabulary for span corruption. pairs: each document is
    a source and a target, each with its end token."""
    languages: tuple[str, str] | None = None
    """The special tokens that sources and targets of pairs begin with, if any."""
    train: SplitRecord
    validation: SplitRecord

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any((split.tasks_sha256 is None) != (self.tasks is None) for split in (self.train, self.validation)):
            raise ValueError("either all splits have tasks and the tasks have names, or neither")
        return self

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Identifies the tokens and their order, as plain values, without reading the files."""
        splits = {name: split.fingerprint for name, split in zip(SPLITS, (self.train, self.validation), strict=True)}
        return {"tokenizer": self.tokenizer_sha256, **splits}

    @property
    def numpy_dtype(self) -> np.dtype:
        """Type of a token on disk."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def tokens(self) -> int:
        """Tokens of both splits, end tokens included."""
        return self.train.tokens + self.validation.tokens

    @property
    def documents(self) -> int:
        """Documents of both splits."""
        return self.train.documents + self.validation.documents

    def save(self, folder: Path) -> None:
        """Write ``manifest.json`` into ``folder``."""
        (folder / MANIFEST).write_text(self.model_dump_json(indent=2, exclude_none=True) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read ``folder/manifest.json``; raises :class:`DataError` if there is none or it is invalid."""
        file = folder / MANIFEST
        if folder.is_file():
            raise DataError(
                f"{folder} is a file, not a corpus; build a corpus from it: colonnade corpus {folder} --out "
                f"{folder.with_suffix('')}"
            )
        if not file.is_file():
            raise DataError(
                f"{folder} is not a corpus: it has no {MANIFEST}; build one with: colonnade corpus FILES --out {folder}"
            )
        try:
            return cls.model_validate_json(file.read_text("utf-8"))
        except UnicodeDecodeError:
            raise DataError(f"{file} is not text; build the corpus again") from None
        except ValidationError as report:
            first = report.errors()[0]
            where = ".".join(str(step) for step in first["loc"]) or "the file"
            raise DataError(
                f"{file} is not a manifest that this version supports: {where}: {first['msg'].lower()}; "
                "build the corpus again"
            ) from None


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest of the two types that fits every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def file_sha256(file: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
