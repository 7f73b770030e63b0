"""What readers run in the command's own process: logs, explain, report, bundle, metrics, submit."""
