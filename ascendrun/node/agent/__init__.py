"""The agent: serves one connection from the head node and ends with it."""
