"""Notifications: targets, delivery, retries. Runs in the controller."""
