"""The stages of the pipeline: one function of (options, runtime) for each mode."""
