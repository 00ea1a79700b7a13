"""From text to batches: tokenizers, corpora in memory-mapped shards, and the order in which samples are read."""

from colonnade.data.batch import Batch
from colonnade.data.corpus import Corpus, build
from colonnade.data.cursor import Cursor
from colonnade.data.loader import Loader
from colonnade.data.manifest import Manifest
from colonnade.data.tokenizer import Tokenizer

__all__ = ["Batch", "Corpus", "Cursor", "Loader", "Manifest", "Tokenizer", "build"]
