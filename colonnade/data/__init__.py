"""From text to batches: tokenizers, corpora in memory-mapped shards, and the order in which samples are read."""

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
