"""Code that runs on a node: standard library only, Python 3.7 and newer."""
