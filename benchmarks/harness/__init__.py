"""Shared by all benchmarks: records, clocks, paired timing, training jobs."""
