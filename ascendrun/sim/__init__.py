"""Simulated hardware for tests and the demo."""
