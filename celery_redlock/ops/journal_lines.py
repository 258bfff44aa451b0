"""
Records of the journal, one line each, for a terminal.

What is in a record comes from the nodes, where others may have written, too: no control character
reaches the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from celery_redlock.ops.text import one_line
from celery_redlock.reading.sentences import sentence
from celery_redlock.words import number

__all__ = ["line", "local_time"]

Record = Mapping[str, Any]

#: Events that are noticed by more than one process: who noticed is worth a word.
NOTICED = ("Node", "Leader")


def line(record: Record) -> str:
    """Return *record* as one line: when, and what happened."""
    by = ""
    if str(record.get("event")).startswith(NOTICED):
        by = f" (process {record.get('pid', '?')} on {record.get('host', '?')})"
    return f"{local_time(record.get('at'))}  {one_line(sentence(record) + by)}"


def local_time(at: object) -> str:
    """Return a moment [s, Unix time] in local time."""
    try:
        return datetime.fromtimestamp(number(at), timezone.utc).astimezone().strftime("%F %T")
    except (OverflowError, ValueError, OSError):  # a year that there is not
        return "?"
