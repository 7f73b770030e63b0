"""The command line: parse, call cluster.py, print."""
