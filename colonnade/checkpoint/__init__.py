"""Weights on disk: native checkpoints, Hugging Face folders and GGUF files, all under any layout."""
