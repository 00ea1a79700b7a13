"""Grouped GEMM kernels for mixture-of-experts feed-forward layers."""
