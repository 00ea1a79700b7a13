"""From text to batches: tokenizers, corpora in memory-mapped shards, and the order in which samples are read."""

from colonnade.data.batch import Batch
from colonnade.data.bert_samples import Pairs
from colonnade.data.corpus import Corpus, build
from colonnade.data.in_memory import TokenData, write_tokens
from colonnade.data.loader import Cursor, Loader, NextToken
from colonnade.data.manifest import Manifest
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.wordpiece import Pieces

__all__ = [
    "Batch",
    "Corpus",
    "Cursor",
    "Loader",
    "Manifest",
    "NextToken",
    "Pairs",
    "Pieces",
    "TokenData",
    "Tokenizer",
    "build",
    "write_tokens",
]
