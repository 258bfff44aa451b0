"""
Two counters in SQLite that are read, thought about, and written under a lock.

The fenced one takes the fence of whoever reads and of whoever writes, and refuses a smaller one
than it has seen. Reading has to show the fence, too: a late writer with an old one would else be
let in between a newer holder's read and its write. The plain one takes what it is given.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

__all__ = ["Registers"]

SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS fenced (name TEXT PRIMARY KEY, value INTEGER, fence INTEGER);
CREATE TABLE IF NOT EXISTS plain (name TEXT PRIMARY KEY, value INTEGER);
CREATE TABLE IF NOT EXISTS writes (register TEXT, name TEXT, fence INTEGER, before INTEGER);
"""
#: A holder of SQLite's own lock may be stopped for seconds [s].
PATIENCE = 60.0


class Registers:
    """The registers of one contender, for one of its clients."""

    def __init__(self, path: Path) -> None:
        self._store = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
        self._store.executescript(SCHEMA)
        self._store.execute("PRAGMA synchronous = OFF")

    def read(self, name: str, fence: int | None) -> tuple[int | None, int]:
        """Return what the fenced register (None for whoever is too late) and the plain one hold."""
        with self._store as store:
            store.execute("BEGIN IMMEDIATE")
            store.execute("INSERT OR IGNORE INTO plain VALUES (?, 0)", [name])
            (plain,) = store.execute("SELECT value FROM plain WHERE name = ?", [name]).fetchone()
            if fence is None:
                return None, plain
            store.execute("INSERT OR IGNORE INTO fenced VALUES (?, 0, 0)", [name])
            found = store.execute(
                "UPDATE fenced SET fence = ? WHERE name = ? AND fence <= ? RETURNING value",
                [fence, name, fence],
            ).fetchone()
            return (found and found[0]), plain

    def write_fenced(self, name: str, fence: int, before: int) -> bool:
        """Store one more than *before*, and return whether that was accepted."""
        with self._store as store:
            store.execute("BEGIN IMMEDIATE")
            accepted = store.execute(
                "UPDATE fenced SET value = ?, fence = ? WHERE name = ? AND fence <= ?",
                [before + 1, fence, name, fence],
            ).rowcount
            if accepted:
                self._note("fenced", name, fence, before)
            return bool(accepted)

    def write_plain(self, name: str, before: int) -> None:
        with self._store as store:
            store.execute("BEGIN IMMEDIATE")
            store.execute("UPDATE plain SET value = ? WHERE name = ?", [before + 1, name])
            self._note("plain", name, None, before)

    def _note(self, register: str, name: str, fence: int | None, before: int) -> None:
        self._store.execute(
            "INSERT INTO writes VALUES (?, ?, ?, ?)", [register, name, fence, before]
        )

    def close(self) -> None:
        self._store.close()
