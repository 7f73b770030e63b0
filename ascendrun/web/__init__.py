"""What browsers are given: style, script, and the one library they use (vendor/uplot)."""
