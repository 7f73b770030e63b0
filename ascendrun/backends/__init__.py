"""Clusters of several kinds behind one protocol: how to reach the agent of a host."""
