"""Submissions, surveys of nodes, preflight checks and staging. Runs in the controller."""
