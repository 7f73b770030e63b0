"""What the command line and the controller, and the controller and the agents, say to each other."""
