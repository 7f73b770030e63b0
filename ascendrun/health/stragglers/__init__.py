"""Stragglers: which ranks are slow, and the likely cause."""
