"""The Python API for looking: what was measured, what happened and why. Stands beside cluster.py, for the same faces."""

from __future__ import annotations
