"""The archive of a job: its contents, without credentials, and how it is written."""
