"""Distributed strategies: replicated and sharded models, their weights and their memory."""
