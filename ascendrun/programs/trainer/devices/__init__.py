"""Accelerators: the device of a rank, chip data, fused operators."""
