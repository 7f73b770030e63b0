"""Data on disk in the state directory: store, samples, settings, migrations. Read by every process."""
