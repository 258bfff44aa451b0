"""
The quorum lock over independent Redis or Valkey nodes.

Knows Redis, and nothing of Celery: `redlock` is what a caller begins with, `held` what it gets.
"""
