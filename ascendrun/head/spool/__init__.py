"""Copies of the nodes' files on the head: logs, samples, artifacts, clocks. Written by the controller."""
