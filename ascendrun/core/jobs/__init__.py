"""A job's record, its lifecycle, its place in the queue and its launch plan."""
