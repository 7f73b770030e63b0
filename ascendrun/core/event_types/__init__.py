"""Types of events, as tables."""
