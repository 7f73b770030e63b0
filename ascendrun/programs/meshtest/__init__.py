"""Compute and communication benchmark of the devices of a few nodes, run by `doctor --deep`."""
