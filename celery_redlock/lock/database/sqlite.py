"""
SQLite as a lock node, for the processes of one machine.

One who writes locks the whole file, so there are no locks of names. The clock is the machine's. A
commit is on the disk when it is answered, unless the URL says that a crash of the machine may lose
some.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sqlite3
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from celery_redlock.lock.database.rows import Row, Writes
from celery_redlock.lock.database.store import META, VERSION, Broken, Busy, Snapshot, Store
from celery_redlock.lock.nodes.guard import Unfit
from celery_redlock.process.forks import around_fork
from celery_redlock.process.mutex import new_mutex

__all__ = ["connected", "drops", "make_tables", "name_of", "tables"]

#: Longest wait for those who write [s].
PATIENCE = 1.0
#: What says which boot of the machine this is; a crash of it may have lost commits.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: What this process finds mounted, and where.
MOUNTS = Path("/proc/self/mountinfo")
#: Whose turn it is to use a file: one of this process, and nobody while it forks. All files are
#: closed then. What SQLite has noted in memory of its locks would else be believed in the child,
#: which has none of them: others would delete, or begin anew, the log that it writes to.
_turn = new_mutex()


def name_of(url: str) -> str:
    """Return the name of the file at *url*, whichever way leads there; ValueError if none does."""
    return f"sqlite{os.path.realpath(path_of(url))}"


def path_of(url: str) -> str:
    where, _, options = url.partition("://")[2].partition("?")
    path = unquote(where)[1:]
    if options:
        raise ValueError("a file has none of these options; a ? of its name is written %3F")
    if not where.startswith("/") or not path or path == ":memory:":
        raise ValueError("write sqlite:// and its whole path: sqlite:////path/to/the/file")
    if not Path(path).is_absolute():
        raise ValueError("all processes need the same file: write sqlite:// and its whole path")
    return path


class Sqlite(Store):
    """One connection to a file."""

    def __init__(self, path: str, name: str, *, is_async: bool) -> None:
        self._path, self._log_path = path, ""
        self._connection: sqlite3.Connection | None = None
        self._has_turn = False
        self.table = f'"{name}"'
        self.hears = False
        self.version = f"SQLite {sqlite3.sqlite_version}"
        self.commits = "async" if is_async else "durable"

    def run(self, *statements: str) -> list[list[tuple[Any, ...]]]:
        with _turn:
            try:
                connection = self._opened()
                return [connection.execute(one).fetchall() for one in statements]
            except sqlite3.Error as error:
                self._undo()
                if "locked" in str(error) or "busy" in str(error):
                    raise Busy(str(error)) from None
                raise Broken(f"{self._path}: {error}") from None

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            found = sqlite3.connect(
                self._path, timeout=PATIENCE, isolation_level=None, check_same_thread=False
            )
            try:
                found.execute("PRAGMA journal_mode = WAL")
                synchronous = "NORMAL" if self.commits == "async" else "FULL"
                found.execute(f"PRAGMA synchronous = {synchronous}")
                found.execute("SELECT 1 FROM sqlite_master").fetchall()  # which opens its log
            except sqlite3.Error:
                found.close()
                raise
            self._log_path = f"{os.path.realpath(self._path)}-wal"  # beside no link to the file
            self._connection, self._log = found, inode_of(self._log_path)
            _every_file.add(self)
        return self._connection

    def _undo(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._connection is not None:
                self._connection.execute("ROLLBACK")

    def literal(self, data: bytes) -> str:
        return f"x'{data.hex()}'"

    def begin(self, exclusive: Sequence[bytes], shared: Sequence[bytes]) -> Snapshot:
        _turn.acquire()
        self._has_turn = True  # until the end of the transaction
        try:
            _, rows = self.run("BEGIN IMMEDIATE", self.select([*exclusive, *shared]))
            return self._snapshot(rows)
        except BaseException:
            self._end_turn()
            raise

    def commit(self, writes: Writes) -> None:
        try:
            super().commit(writes)
            self._check_log()  # else it is on no disk
        finally:
            self._end_turn()

    def roll_back(self) -> None:
        try:
            super().roll_back()
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            _turn.release()

    def read(self, keys: Sequence[bytes]) -> Snapshot:
        (rows,) = self.run(self.select(keys))
        return self._snapshot(rows)

    def _snapshot(self, rows: Iterable[tuple[Any, ...]]) -> Snapshot:
        self._check_log()
        if self._file() != self._stamp:
            msg = f"{self._path} is another file now"
            raise Broken(msg)
        return Snapshot(time.time_ns() // 1000, [Row(*row) for row in rows])

    def _check_log(self) -> None:
        """Raise `Broken` if the log that we write to was deleted, and our commits with it."""
        if self._connection is not None and inode_of(self._log_path) != self._log:
            msg = (
                f"{self._log_path} was deleted while it was in use; give the locks a file that "
                "nothing else opens"
            )
            raise Broken(msg)

    def _file(self) -> str:
        if not (found := inode_of(self._path)):
            msg = f"{self._path} is not there any more"
            raise Broken(msg)
        return found

    def meet(self, *, is_async: bool) -> None:
        if is_mounted(os.path.realpath(self._path)):
            msg = (
                f"{self._path} is mounted by itself, without the two files beside it, so that who "
                "has it elsewhere sees none of its locks; mount its folder"
            )
            raise Unfit(msg)
        self.run()  # which opens it
        self._stamp = self._file()
        self.run("BEGIN IMMEDIATE", *tables("", self.table.strip('"')), "COMMIT")
        (meta,) = self.run(
            f"SELECT value FROM {self.table} WHERE key = {self.literal(META)} ORDER BY part"
        )
        ident, made, version = (bytes(value) for (value,) in meta)
        self.check_version(version)
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
        with _turn, contextlib.suppress(sqlite3.Error):
            if self._connection is not None:
                self._connection.close()
            self._connection = None
        self._end_turn()

    def hang_up(self) -> None:
        connection = self._connection
        with contextlib.suppress(sqlite3.Error):  # it has just been closed
            if connection is not None:
                connection.interrupt()

    def forget(self) -> None:
        """It was closed before the fork."""


def inode_of(path: str) -> str:
    """Return which file is at *path*; empty if there is none."""
    try:
        found = Path(path).stat()
    except OSError:
        return ""
    return f"{found.st_dev} {found.st_ino}"


def is_mounted(path: str) -> bool:
    """Return whether *path* is a mount of its own, as of a file in a container."""
    for character in "\\ \t\n":  # as the kernel writes them
        path = path.replace(character, f"\\{ord(character):03o}")
    try:
        mounts = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # another system
        return False
    return any(mount.split(" ")[4:5] == [path] for mount in mounts)


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


_every_file: weakref.WeakSet[Sqlite] = weakref.WeakSet()


def _before_fork() -> None:
    _turn.acquire()
    for file in list(_every_file):
        file.close()


around_fork("files", _turn.release, before=_before_fork, in_parent=_turn.release)
