"""What `ascendrun demo` shows: two simulated Ascend nodes, a job for them, and a training that needs nothing."""
