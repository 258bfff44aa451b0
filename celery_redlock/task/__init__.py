"""The lock around a Celery task; ``docs/architecture.md`` shows how an execution gets there."""
