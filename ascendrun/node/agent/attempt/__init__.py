"""The attempts of a node: prepared, started, stopped, and the checkpoints that they resume from."""
