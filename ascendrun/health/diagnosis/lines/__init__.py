"""What single lines of output mean."""
