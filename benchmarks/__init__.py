"""ascendrun beside its peers, on the same work in one run; README.md says how to read the numbers."""
