"""GGUF files, read into any layout: config, weights, tokenizer and chat template from one file."""

from colonnade.checkpoint.gguf.read import GGUFFile, find_smollm2
from colonnade.checkpoint.gguf.tokenizer import TokenizerParts

__all__ = ["GGUFFile", "TokenizerParts", "find_smollm2"]
