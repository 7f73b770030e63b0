"""The page and picture of `ascendrun report`."""
