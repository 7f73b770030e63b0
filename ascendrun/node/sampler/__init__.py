"""The sampler: records device, host and rank metrics next to a supervisor."""
