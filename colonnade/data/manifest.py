"""The manifest: what a corpus folder holds, how large it is, and how to tell that it is whole.

    corpus/
      manifest.json               this record
      tokenizer/                  tokenizer.json, tokenizer_config.json
      train-00000.bin ...         token ids, little-endian uint16 or uint32, every shard but the last equally long
      train.documents.bin         int64: where each document ends in the split's stream of tokens, after its end token
      train.tasks.bin             uint16: the number of each document's task, where documents have tasks
      validation-00000.bin ...    the same

Equal sources and settings give a byte-identical folder: there are no dates or paths in it.
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
    """The train or the validation part."""

    tokens: int = Count
    documents: int = Count
    documents_sha256: str = Sha256
    tasks_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Where documents have tasks."""
    shards: tuple[Shard, ...]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Sizes and checksums of its files, in plain values."""
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
            raise ValueError(f"shards of {sizes} tokens do not make {self.tokens}, equal ones and a rest")
        return self


class Manifest(_Record):
    """The record of a whole corpus."""

    format: Literal["colonnade-corpus"] = FORMAT
    version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(gt=0)
    end_id: int | None = Field(default=None, ge=0)
    """The token after each document; None: documents were given as tokens."""
    tokenizer_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """None: the tokens came without a tokenizer."""
    validation_share: float = Field(ge=0, lt=1)
    spans: int | None = Field(default=None, gt=0)
    """Of a corpus of one document: how many spans of it are held out, each a document of its own."""
    source_bytes: int = Count
    tasks: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Their names, by number; None: documents have none."""
    train: SplitRecord
    validation: SplitRecord

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any((split.tasks_sha256 is None) != (self.tasks is None) for split in (self.train, self.validation)):
            raise ValueError("a split's tasks are known and their names are not, or the other way round")
        return self

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Which tokens in which order, in plain values, without a look at the files."""
        splits = {name: split.fingerprint for name, split in zip(SPLITS, (self.train, self.validation), strict=True)}
        return {"tokenizer": self.tokenizer_sha256, **splits}

    @property
    def numpy_dtype(self) -> np.dtype:
        """How a token lies on disk."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def tokens(self) -> int:
        """Tokens in all, end tokens included."""
        return self.train.tokens + self.validation.tokens

    @property
    def documents(self) -> int:
        """Documents in all."""
        return self.train.documents + self.validation.documents

    def save(self, folder: Path) -> None:
        """Write ``manifest.json`` into ``folder``."""
        (folder / MANIFEST).write_text(self.model_dump_json(indent=2, exclude_none=True) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read ``folder/manifest.json``; raises :class:`DataError` when there is none, or it is not one of ours."""
        file = folder / MANIFEST
        if folder.is_file():
            raise DataError(
                f"{folder} is a file, and no corpus yet; make one of it: colonnade corpus {folder} --out "
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
            where = ".".join(str(step) for step in first["loc"]) or "the whole"
            raise DataError(
                f"{file} is not a manifest that this version reads: {where}: {first['msg'].lower()}; "
                "build the corpus again"
            ) from None


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smaller of the two unsigned integers that hold every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def file_sha256(file: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
