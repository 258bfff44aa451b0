"""Waiting for a lock: known to the nodes, and woken by their hints."""
