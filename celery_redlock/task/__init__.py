"""The lock around a Celery task: the way there is in ``docs/architecture.md``."""
