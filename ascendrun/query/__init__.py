"""Readers in the command's own process: logs, explain, report, bundle, metrics; and submit."""
