"""The meaning of single lines of output."""
