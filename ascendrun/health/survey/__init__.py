"""From raw tool output of nodes to facts."""
