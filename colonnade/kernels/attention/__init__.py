"""Attention over packed sequences and over a paged cache."""
