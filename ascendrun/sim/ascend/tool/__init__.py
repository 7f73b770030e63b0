"""The two tools themselves, as they run on a simulated node: standard library only, nothing else of ascendrun."""
