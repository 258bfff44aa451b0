"""
SQLite as a lock node, for the processes of one machine.

One who writes locks the whole file, so there are no locks of names. The clock is the machine's. A
commit is on the disk when it is answered, unless the URL says that a crash of the machine may lose
some.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from celery_redlock.lock.database.rows import Row
from celery_redlock.lock.database.store import META, VERSION, Broken, Busy, Snapshot, Store
from celery_redlock.lock.nodes.guard import Unfit

__all__ = ["connected", "drops", "make_tables", "name_of", "tables"]

#: Longest wait for those who write [s].
PATIENCE = 1.0
#: What says which boot of the machine this is; a crash of it may have lost commits.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Connections that a child has inherited; to close one there would harm its parent's.
_inherited: list[sqlite3.Connection] = []


def name_of(url: str) -> str:
    """Return the name of the file at *url*; ValueError if there is none."""
    return f"sqlite{path_of(url)}"


def path_of(url: str) -> str:
    parts = urlsplit(url)
    path = unquote(parts.path)[1:]
    if parts.netloc or not path or path == ":memory:":
        raise ValueError("write sqlite:// and its whole path: sqlite:////path/to/the/file")
    if not Path(path).is_absolute():
        raise ValueError("all processes need the same file: write sqlite:// and its whole path")
    return path


class Sqlite(Store):
    """One connection to a file."""

    def __init__(self, path: str, name: str, *, is_async: bool) -> None:
        self._path = path
        self.table = f'"{name}"'
        self.hears = False
        try:
            self._connection = sqlite3.connect(
                path, timeout=PATIENCE, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute(f"PRAGMA synchronous = {'NORMAL' if is_async else 'FULL'}")
        except sqlite3.Error as error:
            raise Broken(f"{path}: {error}") from None
        self.version = f"SQLite {sqlite3.sqlite_version}"
        self.commits = "async" if is_async else "durable"

    def run(self, *statements: str) -> list[list[tuple[Any, ...]]]:
        try:
            return [self._connection.execute(one).fetchall() for one in statements]
        except sqlite3.OperationalError as error:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            if "locked" in str(error) or "busy" in str(error):
                raise Busy(str(error)) from None
            raise Broken(f"{self._path}: {error}") from None
        except sqlite3.Error as error:
            raise Broken(f"{self._path}: {error}") from None

    def literal(self, data: bytes) -> str:
        return f"x'{data.hex()}'"

    def begin(self, exclusive: Sequence[bytes], shared: Sequence[bytes]) -> Snapshot:
        _, rows = self.run("BEGIN IMMEDIATE", self.select([*exclusive, *shared]))
        return self._snapshot(rows)

    def read(self, keys: Sequence[bytes]) -> Snapshot:
        (rows,) = self.run(self.select(keys))
        return self._snapshot(rows)

    def _snapshot(self, rows: Iterable[tuple[Any, ...]]) -> Snapshot:
        if self._file() != self._stamp:
            msg = f"{self._path} is another file now"
            raise Broken(msg)
        return Snapshot(time.time_ns() // 1000, [Row(*row) for row in rows])

    def _file(self) -> str:
        try:
            found = Path(self._path).stat()
        except OSError as error:
            raise Broken(f"{self._path}: {error.strerror}") from None
        return f"{found.st_dev} {found.st_ino}"

    def meet(self, *, is_async: bool) -> None:
        self._stamp = self._file()
        self.run("BEGIN IMMEDIATE", *tables("", self.table.strip('"')), "COMMIT")
        (meta,) = self.run(
            f"SELECT value FROM {self.table} WHERE key = {self.literal(META)} ORDER BY part"
        )
        ident, made, version = (bytes(value) for (value,) in meta)
        if version != b"%d" % VERSION:
            raise Unfit(f"has tables of another version ({self.table})")
        self.made, self.micros_at_start = int(made), time.time_ns() // 1000
        parts = [ident.decode(), self._stamp, boot_id() if is_async else ""]
        self.run_id = hashlib.sha1("\n".join(parts).encode()).hexdigest()  # noqa: S324  no secret

    def tell(self, told: Iterable[tuple[bytes, bytes]]) -> list[str]:  # noqa: ARG002  all look
        return []

    def listen(self, channel: bytes) -> bool:  # noqa: ARG002  all look
        return False

    def heard(self) -> list[bytes]:
        return []

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def hang_up(self) -> None:
        self._connection.interrupt()

    def forget(self) -> None:
        _inherited.append(self._connection)


def boot_id() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:  # another system: then every connection is to be new
        return secrets.token_hex(16)


def connected(url: str, schema: str, name: str, *, is_polled: bool, is_async: bool) -> Sqlite:  # noqa: ARG001  as of any database
    """Open the file, and make its tables; raises `Broken` if it cannot be opened."""
    store = Sqlite(path_of(url), name, is_async=is_async)
    try:
        store.meet(is_async=is_async)
    except BaseException:
        store.close()
        raise
    return store


def tables(schema: str, name: str) -> list[str]:  # noqa: ARG001  as of any database
    """Return the statements that make the table; they do no harm where it is."""
    meta = f"x'{META.hex()}'"
    now = "CAST(CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER) AS BLOB)"
    table = (
        f'CREATE TABLE IF NOT EXISTS "{name}" (key BLOB NOT NULL, part BLOB NOT NULL, '
        "kind INTEGER NOT NULL, value BLOB NOT NULL, ends INTEGER, PRIMARY KEY (key, part)) "
        "WITHOUT ROWID"
    )
    rows = (
        f"({meta}, x'{b':id'.hex()}', 0, CAST(hex(randomblob(16)) AS BLOB), NULL), "
        f"({meta}, x'{b':made'.hex()}', 0, {now}, NULL), "
        f"({meta}, x'{b':version'.hex()}', 0, x'{str(VERSION).encode().hex()}', NULL)"
    )
    insert = f'INSERT INTO "{name}" (key, part, kind, value, ends) VALUES {rows}'
    return [table, f"{insert} ON CONFLICT DO NOTHING"]


def drops(schema: str, name: str) -> list[str]:  # noqa: ARG001  as of any database
    """Return the statements that drop what `tables` makes."""
    return [f'DROP TABLE IF EXISTS "{name}"']


def make_tables(url: str, schema: str, name: str) -> bool:  # noqa: ARG001  as of any database
    """Return whether the table was missing, and is made; raises `Broken` if that cannot be."""
    store = Sqlite(path_of(url), name, is_async=False)
    try:
        (found,) = store.run(f"SELECT 1 FROM sqlite_master WHERE name = '{name}'")
        store.meet(is_async=False)
    finally:
        store.close()
    return not found
