"""Conversion of raw tool output of nodes to facts."""
