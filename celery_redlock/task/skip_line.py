"""
Celery's log line of a task that was skipped: short, as our own line before it says who and why.

Celery writes out the whole result, whatever its ``__repr__`` is, and with it all about the holder.
What is stored in the result backend is another matter, and stays.
"""

from __future__ import annotations

import logging

__all__ = ["TRACER", "shorten"]

#: Celery's logger of how tasks end.
TRACER = "celery.app.trace"
#: How a `Skipped` begins as Celery writes it.
SKIPPED = "{'skipped': "


def shorten(record: logging.LogRecord) -> bool:
    """Cut a `Skipped` in *record* to its first key."""
    told = record.args.get("return_value") if isinstance(record.args, dict) else None
    if isinstance(told, str) and told.startswith(SKIPPED):
        record.args = {**record.args, "return_value": f"{told.partition(',')[0]}, ...}}"}  # type: ignore[dict-item]
    return True
