"""Attention backends: packed sequences for training, a paged KV cache for serving."""
