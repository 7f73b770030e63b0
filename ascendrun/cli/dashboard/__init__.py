"""The dashboard: pages and a JSON API of this user's jobs and nodes, served by the command to browsers."""
