"""Samples of devices, hosts and steps, read from the records of nodes."""
