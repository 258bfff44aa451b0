"""Uniqueness at publish: the marker that stands for a name while its task is queued or runs."""
