"""Parts of the benchmarks of mixture-of-experts layers."""
