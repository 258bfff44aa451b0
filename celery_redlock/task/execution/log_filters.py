"""
Celery's log lines of a task that was skipped, and of a slot that is a duplicate: short.

Of the first, our own line before it says who and why, and Celery writes out the whole result,
whatever its ``__repr__`` is. What is stored in the result backend is another matter, and stays.
Of the second, beat writes the traceback of an error for what ``on_duplicate="fail"`` asks for.
"""

from __future__ import annotations

import logging

from celery_redlock.errors import DuplicateTask

__all__ = ["BEAT", "TRACER", "shorten", "without_traceback"]

#: Celery's logger of beat.
BEAT = "celery.beat"
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


def without_traceback(record: logging.LogRecord) -> bool:
    """Tell in one line that beat published nothing, where that is what a duplicate leads to."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and isinstance(error.__context__, DuplicateTask):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "Nothing published: %s", (str(error.__context__),)
        record.exc_info = None
    return True
