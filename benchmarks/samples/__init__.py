"""What sampling costs a node."""
