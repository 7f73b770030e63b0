"""The head's side of the agents: one connection for each host, one-shot commands. Runs in the controller."""
