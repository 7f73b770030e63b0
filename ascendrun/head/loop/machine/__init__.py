"""The machines of a head node, by subject: records, reconciliation, holds, closures, memory, contenders."""
