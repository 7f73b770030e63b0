"""Samples of devices, hosts and steps, read from what nodes record."""
