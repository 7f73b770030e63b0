"""The agent: serves one connection from the head and ends with it."""
