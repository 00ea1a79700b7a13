"""Repairs text, and filters documents by length in tokens and by datatrove's named filters."""

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError

_NEEDS_FTFY = re.compile(r"[^\t\n -%'-~]")
"""Characters that ftfy may change; ``&`` may begin an HTML entity."""
_TOKEN = re.compile(r"\w+|[^\w\s]")
_WORD_END = re.compile(r"(?<=[^\W_])(?=\s)")
_PREFIX = 4096


def mend(text: str) -> str:
    """``text`` with wrongly decoded characters repaired (ftfy), and lines joined that break a sentence.

    A line is joined to the next one if it ends with a letter, a digit, a comma or a semicolon and the next one begins
    with a lower-case letter (Megatron-LM does so for CC-Stories).
    """
    if _NEEDS_FTFY.search(text):
        import ftfy

        text = ftfy.fix_text(text)
    first, *others = text.split("\n")
    parts = [first]
    for line in others:
        before, after = parts[-1].rstrip(" \t"), line.lstrip(" \t")
        if before and (before[-1].isalnum() or before[-1] in ",;") and "a" <= after[:1] <= "z":
            parts[-1] = before
            parts += [" ", after]
        else:
            parts += ["\n", line]
    return "".join(parts)


@dataclass(frozen=True)
class MinTokens:
    """Counts tokens of short documents with ``tokenizer``, or words and punctuation marks without one."""

    least: int
    tokenizer: Path | None

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_file(self.tokenizer) if self.tokenizer else None

    def __getstate__(self) -> dict[str, Any]:
        return {"least": self.least, "tokenizer": self.tokenizer}

    def count_if_fewer(self, text: str) -> int | None:
        """The number of tokens, if it is below ``least``."""
        if len(text) > _PREFIX * max(1, self.least // 128):
            ends = [match.start() for match in _WORD_END.finditer(text, 0, _PREFIX * max(1, self.least // 128))]
            if ends and self._count(text[: ends[-1]]) >= self.least:
                return None
        count = self._count(text)
        return count if count < self.least else None

    def _count(self, text: str) -> int:
        if self._tokenizer is None:
            return sum(1 for _ in islice(_TOKEN.finditer(text), self.least))
        return len(self._tokenizer.encode_documents([text])[0])


def named_filter(name: str, removed: Any) -> Any:
    """datatrove's filter of that name; raises :class:`ConfigError` if a package that it needs is missing."""
    from datatrove.pipeline import filters

    classes = {
        "gopher-quality": filters.GopherQualityFilter, "gopher-repetition": filters.GopherRepetitionFilter,
        "c4-quality": filters.C4QualityFilter, "fineweb-quality": filters.FineWebQualityFilter,
    }  # fmt: skip
    try:
        return classes[name](exclusion_writer=removed)
    except ImportError as error:
        raise ConfigError(f"filter '{name}' of datatrove needs more packages: {error}") from None
