"""Weights on disk: checkpoints of our own in any layout, Hugging Face folders, GGUF files."""
