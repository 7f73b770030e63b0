"""Record, lifecycle, queue order and launch plan of a job."""
