"""The messages between commands and the controller, and between the controller and agents."""
