"""Log lines: merging, folding, redaction."""
