"""From text to batches: tokenizers, corpora in memory-mapped shards, and the order in which samples are read."""

from colonnade.data.batch import Batch
from colonnade.data.corpus import Corpus, build
from colonnade.data.cursor import Cursor
from colonnade.data.loader import Loader, NextToken
from colonnade.data.manifest import Manifest
from colonnade.data.pairs import Pairs
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.tokens import TokenData, write_tokens
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
