"""SSH from the head: paramiko and OpenSSH transports, keys, configuration, host keys. Runs in the controller."""
