"""The machines of a head node: records, comparison with what nodes report, holds and closures, placement of jobs."""
