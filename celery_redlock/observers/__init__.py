"""Ready observers: each takes the events of `celery_redlock.events` somewhere."""
