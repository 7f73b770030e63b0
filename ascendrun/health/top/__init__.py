"""The rows of `ascendrun top`."""
