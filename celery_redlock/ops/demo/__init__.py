"""``celery-redlock demo``: real servers, a real worker, failures, and a check of every claim."""
