"""AIS points: readers, tracks, splits and synthetic tracks."""
