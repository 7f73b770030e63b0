"""Small clients and the rank that benchmarks run."""
