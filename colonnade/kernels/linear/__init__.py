"""Kernels of linear layers: reference, float8, weight-only quantised, skinny and batch-invariant GEMMs."""
