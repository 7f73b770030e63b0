"""The archive of a job: what goes in, without credentials, and how it is written."""
