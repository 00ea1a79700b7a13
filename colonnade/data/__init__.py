"""From text to batches: tokenizers, corpora in memory-mapped shards, and the order in which samples are read.

Names are imported on first use: the processes that clean a corpus need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colonnade.data.batch import Batch
    from colonnade.data.bert_samples import MaskingVocabulary, SentencePairs
    from colonnade.data.corpus import Corpus
    from colonnade.data.corpus_builder import build
    from colonnade.data.loader import Cursor, Loader, NextToken
    from colonnade.data.manifest import Manifest
    from colonnade.data.pretokenized import TokenData, write_tokens
    from colonnade.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "Cursor",
    "Loader",
    "Manifest",
    "MaskingVocabulary",
    "NextToken",
    "SentencePairs",
    "TokenData",
    "Tokenizer",
    "build",
    "write_tokens",
]

_MODULES = {
    "Batch": "batch",
    "Corpus": "corpus",
    **dict.fromkeys(("Cursor", "Loader", "NextToken"), "loader"),
    "Manifest": "manifest",
    **dict.fromkeys(("MaskingVocabulary", "SentencePairs"), "bert_samples"),
    **dict.fromkeys(("TokenData", "write_tokens"), "pretokenized"),
    "Tokenizer": "tokenizer",
    "build": "corpus_builder",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"colonnade.data.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
