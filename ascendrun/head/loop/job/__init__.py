"""One live job: its start, leases and end, copies of its files."""
