"""The data of `ascendrun report`."""
