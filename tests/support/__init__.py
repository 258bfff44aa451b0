"""
What the tests share: a TCP proxy that misbehaves, real Celery processes, a record of events.

Imported as ``support`` (``pythonpath`` in pyproject.toml), also by the modules that the
tests hand to a worker.
"""
