"""The controller: its loop, the live jobs and their runners. Runs in the controller only."""
