"""Data types and decision logic: pure functions without sockets, clock or files."""
