"""GGUF files, read under any layout: config, weights, tokenizer and chat template from one file."""

from colonnade.checkpoint.gguf.read import GGUFFile
from colonnade.checkpoint.gguf.tokenizer import TokenizerParts

__all__ = ["GGUFFile", "TokenizerParts"]
