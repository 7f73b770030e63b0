"""Words and decisions: pure, no sockets, no clock, no files."""
