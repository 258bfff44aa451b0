"""
The loggers of this package: whatever they write is one line without control characters.

Task ids, lock names and the errors of nodes were chosen by whoever may write to the broker or to
the nodes. A newline would begin a record that nobody wrote, an escape sequence would be obeyed by
the terminal that shows the log.

A fork waits for threads that write to the log. A child has the file's own lock as it was then: held
by a thread that the child does not have, the child's first line would wait for good.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import traceback
from typing import Any

from celery_redlock.process.forks import around_fork

__all__ = ["LONGEST", "LONGEST_LINE", "cut", "get_logger", "printable"]

#: How much is shown of one name or id, and of a whole message [bytes].
LONGEST, LONGEST_LINE = 120, 4000
#: How much is stored of one id or other word [bytes]; an id in AMQP has 255.
LONGEST_STORED = 1000
#: Digits of the digest of what is cut, and bytes of a character.
DIGEST, MOST_BYTES = 32, 4
#: How a frame begins in a traceback: what follows is our own source code.
FRAME = "  File "
#: Before the second line of an error's text: no record begins like that.
CONTINUED = "\n    "
#: How long a fork waits for the log [s]. A handler that hangs must not hang the worker.
LONGEST_WRITE = 2.0


def get_logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    logger.addFilter(make_printable)
    return logger


def printable(value: object, longest: int = LONGEST) -> str:
    """Return *value* in one line, without control characters; a longer one is cut."""
    text = cut(str(value), longest)
    return "".join(char if char.isprintable() else "?" for char in text)


def cut(text: str, longest: int = LONGEST_STORED) -> str:
    """
    Return *text*, or the beginning and a digest of what is longer [bytes].

    All that is stored of ours, or shown, and that somebody else has chosen, is cut here; so what is
    shown of two long names differs, and is the same everywhere.
    """
    if len(text) <= longest // MOST_BYTES:  # most are, and need no encoding
        return text
    encoded = text.encode(errors="surrogatepass")
    if len(encoded) <= longest:
        return text
    begin = encoded[: longest - DIGEST - 1].decode(errors="ignore")
    return f"{begin}~{hashlib.sha256(encoded).hexdigest()[:DIGEST]}"


def make_printable(record: logging.LogRecord) -> bool:
    """Make *record* printable; one that is keeps its message and arguments."""
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001  each handler has its own word for that
        return True
    if len(message) > LONGEST_LINE or not message.isprintable():
        record.msg, record.args = printable(message, LONGEST_LINE), ()
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        parts = list(traceback.TracebackException.from_exception(error).format())
        tamed = [part if part.startswith(FRAME) else set_in(part) for part in parts]
        if tamed != parts:
            record.exc_text = "".join(tamed).rstrip("\n")
    return True


def set_in(part: str) -> str:
    """Return *part* of a traceback with further lines of an error's text set in."""
    text = part.lstrip("\n")
    inner = text.rstrip("\n")
    lines = [printable(line, LONGEST_LINE) for line in inner.split("\n")]
    begin, end = part[: len(part) - len(text)], text[len(inner) :]
    return f"{begin}{CONTINUED.join(lines)}{end}"


# --- forks ---------------------------------------------------------------------------------


class Forking(threading.local):
    """The locks of handlers that this thread holds, for each of its forks under way."""

    def __init__(self) -> None:
        self.held: list[list[Any]] = []


_forking = Forking()


def locks_of_handlers() -> list[Any]:
    """Return the locks of all handlers, in the same order for every thread."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {id(it): it for logger in loggers for it in getattr(logger, "handlers", ())}
    return [handlers[key].lock for key in sorted(handlers) if handlers[key].lock is not None]


def _before_fork() -> None:
    ends = time.monotonic() + LONGEST_WRITE
    held: list[Any] = []
    _forking.held.append(held)
    for lock in locks_of_handlers():
        if lock.acquire(timeout=max(0.0, ends - time.monotonic())):
            held.append(lock)  # noqa: PERF401  as it goes, should a signal strike


def _after_fork() -> None:
    for lock in reversed(_forking.held.pop()):
        lock.release()


def _after_fork_in_child() -> None:
    _forking.held.clear()  # `logging` has freed them all, and was asked first


around_fork("log", _after_fork_in_child, before=_before_fork, in_parent=_after_fork)
