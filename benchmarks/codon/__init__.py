"""Benchmarks of the program codon, on one CPU core."""
