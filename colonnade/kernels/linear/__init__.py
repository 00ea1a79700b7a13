"""Rows times a weight matrix."""
