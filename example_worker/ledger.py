"""
What the tasks write to: a SQLite file that refuses a writer whose lock has passed on.

One row per lock holds the largest fence that ever wrote. It is compared and raised in the
transaction of the write itself, so a writer that was paused for too long changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

PATH = os.environ.get("LEDGER", str(Path(tempfile.gettempdir(), "example-ledger.sqlite3")))

SCHEMA = """
CREATE TABLE IF NOT EXISTS fence (lock TEXT PRIMARY KEY, highest INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS entry (name TEXT PRIMARY KEY, content TEXT NOT NULL,
                                  fence INTEGER, writes INTEGER NOT NULL DEFAULT 1);
"""
RAISE_FENCE = """
INSERT INTO fence VALUES (:lock, :fence)
ON CONFLICT (lock) DO UPDATE SET highest = :fence WHERE highest <= :fence
"""
WRITE = """
INSERT INTO entry (name, content, fence) VALUES (:name, :content, :fence)
ON CONFLICT (name) DO UPDATE SET content = :content, fence = :fence, writes = writes + 1
"""


class StaleWriterError(Exception):
    """Somebody who got the lock later has written already."""


@contextlib.contextmanager
def transaction() -> Iterator[sqlite3.Connection]:
    """Open the file for the body of a ``with``; what was written stays unless it raises."""
    db = sqlite3.connect(PATH, timeout=10, isolation_level=None)
    try:
        db.executescript(SCHEMA)
        db.execute("BEGIN IMMEDIATE")
        yield db
        db.execute("COMMIT")
    finally:
        db.close()  # without COMMIT nothing of it happened


def write(lock: str, fence: int | None, name: str, content: str) -> None:
    """
    Write one entry on behalf of the holder of a lock.

    Args:
        lock: Lock name.
        fence: The holder's fencing number; None where the task runs without a lock, which
            this store then cannot tell from any other writer.
        name: Of the entry.
        content: Of the entry.

    Raises:
        StaleWriterError: A holder with a larger fence has written before.
    """
    with transaction() as db:
        if fence is not None:
            raised = db.execute(RAISE_FENCE, {"lock": lock, "fence": fence})
            if raised.rowcount == 0:
                raise StaleWriterError(f"{lock}: fence {fence} is not the newest any more")
        db.execute(WRITE, {"name": name, "content": content, "fence": fence})


def read(name: str) -> str | None:
    """Return the content of one entry, None if there is none."""
    with transaction() as db:
        found = db.execute("SELECT content FROM entry WHERE name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])


def count() -> int:
    """Return how many entries there are."""
    with transaction() as db:
        return int(db.execute("SELECT count(*) FROM entry").fetchone()[0])
