"""
A database as the batches see it, and what of its SQL is the same everywhere.

One trip to the database is one call here: several statements at once, and the rows of each. A
dialect says how bytes are written, and how a transaction begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from celery_redlock.lock.database.loaded import EARS, INBOX
from celery_redlock.lock.database.rows import STREAM, STRING, Row, Writes, entries_key
from celery_redlock.lock.nodes.guard import Unfit

__all__ = ["VERSION", "Broken", "Busy", "Snapshot", "Store"]

#: Of the tables; a number in them says which they have.
VERSION = 1
#: Key of what the tables say of themselves.
META = b"\0redlock"


class Broken(Exception):
    """The database does not answer (any more), or is another one now; says why."""


class Busy(Exception):
    """The transaction was undone, as others are in its way; it can be tried anew."""


class Snapshot(NamedTuple):
    """The rows of some keys, and when that was."""

    micros: int  # the database's clock [us, Unix time]
    rows: list[Row]


class Store(ABC):
    """
    One connection to a database with our tables.

    Attributes:
        run_id: 40 characters that are others once the database may have forgotten a commit.
        version: Of the server, for people.
        commits: "durable" if none is ever lost, "async" if a crash may lose the last ones, "unsafe"
            if it may lose any.
        made: When the tables were made [us, Unix time].
        micros_at_start: The database's clock when it was connected.
        hears: Whether the server says at once what is told; else one has to look.
        table: Its name as SQL has it.
    """

    run_id: str
    version: str
    commits: str
    made: int
    micros_at_start: int
    hears: bool
    table: str

    # -- the dialect -------------------------------------------------------------------

    @abstractmethod
    def run(self, *statements: str) -> list[list[tuple[Any, ...]]]:
        """Run *statements* in one trip and return the rows of each; raises Broken or Busy."""

    @abstractmethod
    def literal(self, data: bytes) -> str:
        """Return *data* as SQL."""

    @abstractmethod
    def begin(self, exclusive: Sequence[bytes], shared: Sequence[bytes]) -> Snapshot:
        """Begin a transaction, wait for its keys, and return their rows as they are then."""

    @abstractmethod
    def read(self, keys: Sequence[bytes]) -> Snapshot:
        """Return the rows of *keys* as they are now."""

    @abstractmethod
    def tell(self, told: Iterable[tuple[bytes, bytes]]) -> list[str]:
        """Return the statements that tell messages on channels."""

    @abstractmethod
    def close(self) -> None:
        """Hang up. A transaction that was begun is undone."""

    @abstractmethod
    def hang_up(self) -> None:
        """End what another thread waits for."""

    @abstractmethod
    def forget(self) -> None:
        """Let go of the connection in a child, without a word to the server."""

    @abstractmethod
    def listen(self, channel: bytes) -> bool:
        """Have the server say what is told on *channel*; False if one has to look instead."""

    @abstractmethod
    def heard(self) -> list[bytes]:
        """Return the messages that have come."""

    @abstractmethod
    def fileno(self) -> int:
        """Return what can be waited for until a message comes; -1 for nothing."""

    def check_version(self, version: bytes) -> None:
        if version != b"%d" % VERSION:
            msg = (
                f"has tables of version {version.decode(errors='replace')} ({self.table}), and "
                f"this celery-redlock has {VERSION}: have the same release everywhere, or name "
                "other tables by table= in the URL"
            )
            raise Unfit(msg)

    # -- transactions ------------------------------------------------------------------

    def commit(self, writes: Writes) -> None:
        self.run(*self.statements(writes), "COMMIT")

    def roll_back(self) -> None:
        self.run("ROLLBACK")

    def statements(self, writes: Writes) -> list[str]:
        found = []
        if writes.keys:
            gone = [one for key in writes.keys for one in (key, entries_key(key))]
            found.append(f"DELETE FROM {self.table} WHERE key IN ({self.literals(gone)})")
        found += [
            f"DELETE FROM {self.table} WHERE key = {self.literal(key)} "
            f"AND part = {self.literal(part)}"
            for key, part in writes.parts
        ]
        if writes.rows:
            found.append(
                f"INSERT INTO {self.table} (key, part, kind, value, ends) "
                f"VALUES {', '.join(map(self.row, writes.rows))} ON CONFLICT (key, part) "
                "DO UPDATE SET kind = excluded.kind, value = excluded.value, ends = excluded.ends"
            )
        found += [
            f"DELETE FROM {self.table} WHERE key = {self.literal(key)} AND part <= ("
            f"SELECT part FROM {self.table} WHERE key = {self.literal(key)} "
            f"ORDER BY part DESC LIMIT 1 OFFSET {most})"
            for key, most in writes.trimmed.items()
        ]
        return found + self.tell(writes.told)

    # -- what is asked outside scripts -------------------------------------------------

    def page(self, after: bytes, below: bytes, count: int) -> list[tuple[bytes, int | None]]:
        """Return keys between the two, in their order, and until when each is kept [us]."""
        upper = f" AND key < {self.literal(below)}" if below else ""
        (found,) = self.run(
            f"SELECT key, ends FROM {self.table} WHERE part = {self.literal(b'')} "
            f"AND key > {self.literal(after)}{upper} ORDER BY key LIMIT {count}"
        )
        return [(bytes(key), ends) for key, ends in found]

    def entries(
        self, key: bytes, parts: tuple[bytes, bytes], count: int, *, is_reversed: bool
    ) -> list[tuple[bytes, bytes]]:
        """Return parts and values of a stream's entries beyond the first part, below the second."""
        after, below = map(self.literal, parts)
        (found,) = self.run(
            f"SELECT part, value FROM {self.table} WHERE key = {self.literal(entries_key(key))} "
            f"AND part > {after} AND part < {below} AND EXISTS (SELECT 1 FROM {self.table} "
            f"WHERE key = {self.literal(key)} AND kind = {STREAM}) "
            f"ORDER BY part {'DESC' if is_reversed else 'ASC'} LIMIT {count}"
        )
        return [(bytes(part), bytes(value)) for part, value in found]

    def open_ears(self, channel: bytes, *, is_polled: bool, ends: int) -> None:
        """Let it be known until then [us] that somebody listens to *channel*."""
        word = b"poll" if is_polled else b"hear"
        row = Row(EARS + channel, b"", STRING, word, ends)
        self.run(*self.statements(Writes([], [], [row], {}, [])))

    def close_ears(self, channel: bytes) -> None:
        self.run(*self.statements(Writes([EARS + channel], [], [], {}, [])))

    def empty_inbox(self, channel: bytes) -> list[bytes]:
        inbox = INBOX + channel
        if not self.read([inbox]).rows:  # as most of the time; and who deletes waits for others
            return []
        (found,) = self.run(
            f"DELETE FROM {self.table} WHERE key = {self.literal(inbox)} RETURNING part, value"
        )
        return [bytes(value) for part, value in sorted(found) if part]

    # -- words -------------------------------------------------------------------------

    def select(self, keys: Sequence[bytes]) -> str:
        return (
            f"SELECT key, part, kind, value, ends FROM {self.table} "
            f"WHERE key IN ({self.literals(keys)})"
        )

    def literals(self, several: Iterable[bytes]) -> str:
        return ", ".join(map(self.literal, several)) or "NULL"

    def row(self, row: Row) -> str:
        ends = "NULL" if row.ends is None else str(row.ends)
        words = (self.literal(row.key), self.literal(row.part), str(row.kind))
        return f"({', '.join(words)}, {self.literal(row.value)}, {ends})"
