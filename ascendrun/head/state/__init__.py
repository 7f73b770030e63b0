"""Data on disk in the state directory: store, samples, outputs, files of users. Read by every process."""
