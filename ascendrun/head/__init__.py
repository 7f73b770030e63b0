"""Doors and the loop on the head: transport, probe, store, controller."""
