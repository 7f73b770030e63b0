"""Controller, state and transports of the head node."""
