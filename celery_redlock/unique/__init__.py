"""Uniqueness at publish: a reservation stands for a name while its task is queued or runs."""
