"""
PostgreSQL as a lock node.

Names are locked with advisory locks of the transaction, sorted, so that nobody waits in a circle.
The clock is read once they are held. Each trip is one query of the simple protocol, without
parameters: so a pooler in transaction mode needs to know nothing of us.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from celery_redlock.lock.database.postgresql_identity import has_tables, identify
from celery_redlock.lock.database.postgresql_url import dialled, name_of
from celery_redlock.lock.database.postgresql_words import (
    CLOCK,
    LIMITS,
    READS,
    WRITES,
    bytea,
    drops,
    qualified,
    tables,
)
from celery_redlock.lock.database.rows import Row
from celery_redlock.lock.database.store import META, Broken, Busy, Snapshot, Store

__all__ = ["connected", "drops", "make_tables", "name_of", "tables"]

#: How long one waits for what another connection of ours has told [s]. A pooler may bring that to
#: nobody, as it gives each transaction to whichever of its own connections is free.
ECHO = 1.0
#: Of a lack of rights, whatever the server's language is.
DENIED = "permission denied"
#: Longest wait for what is asked of a database that was connected, or for its tables [s].
LONGEST = 5.0
RETRIED = (errors.DeadlockDetected, errors.LockNotAvailable, errors.SerializationFailure)


class Postgres(Store):
    """One connection to PostgreSQL."""

    def __init__(self, url: str, schema: str, name: str) -> None:
        self._url = url
        self._connection = dialled(url)
        self.hears = True
        self.table = qualified(schema, name)
        self._name = name
        self._stamp = ""
        self._stamped = ""
        self.limits = LIMITS
        self._told: list[str] = []
        self._connection.add_notify_handler(lambda told: self._told.append(told.payload))

    def meet(self, schema: str, name: str, *, is_polled: bool, is_async: bool) -> None:
        """Learn who the database is; raises Unfit where it must not be the lock node."""
        self.hears = not is_polled
        found = identify(self, schema, name, is_async=is_async)
        self.run_id, self._stamped, self._stamp = found.run_id, found.stamped, found.stamp
        self.version, self.commits, self.limits = found.version, found.commits, found.limits
        self.made, self.micros_at_start = found.made, found.micros

    # -- statements --------------------------------------------------------------------

    def run(self, *statements: str) -> list[list[tuple[Any, ...]]]:
        if self._connection.pgconn.transaction_status == TransactionStatus.IDLE:
            return self.alone(WRITES, *statements)
        return self.sent(*statements)

    def alone(self, begin: str, *statements: str) -> list[list[tuple[Any, ...]]]:
        """Run *statements* in a transaction of their own, which is like all of ours."""
        before = (begin, *self.limits)
        return self.sent(*before, *statements, "COMMIT")[len(before) : -1]

    def sent(self, *statements: str) -> list[list[tuple[Any, ...]]]:
        """Run *statements* in whichever transaction there is; raises Broken or Busy."""
        found = []
        try:
            cursor = self._connection.execute("; ".join(statements).encode())
            for _ in statements:
                found.append(cursor.fetchall() if cursor.description is not None else [])
                cursor.nextset()
        except RETRIED as error:
            with contextlib.suppress(psycopg.Error):
                self._connection.execute("ROLLBACK")
            raise Busy(words_of(error)) from error
        except (psycopg.Error, OSError) as error:
            raise Broken(words_of(error)) from error
        return found

    def literal(self, data: bytes) -> str:
        return bytea(data)

    def begin(self, exclusive: Sequence[bytes], shared: Sequence[bytes]) -> Snapshot:
        keys = sorted(
            [(self.lock_of(key), False) for key in exclusive]
            + [(self.lock_of(key), True) for key in shared]
        )
        ids = ", ".join(str(ident) for ident, _ in keys)
        flags = ", ".join(str(is_shared).lower() for _, is_shared in keys)
        *_, (stamp,), rows = self.sent(
            WRITES,
            *self.limits,
            "SELECT CASE WHEN s THEN pg_advisory_xact_lock_shared(i) ELSE "
            f"pg_advisory_xact_lock(i) END FROM unnest(ARRAY[{ids}]::bigint[], "
            f"ARRAY[{flags}]::boolean[]) AS lock(i, s)",
            self.now(self._stamped),
            self.select([*exclusive, *shared]),
        )
        return self._snapshot(stamp, rows)

    def read(self, keys: Sequence[bytes]) -> Snapshot:
        (stamp,), rows = self.alone(READS, self.now(self._stamped), self.select(keys))
        return self._snapshot(stamp, rows)

    def lock_of(self, key: bytes) -> int:
        digest = hashlib.sha1(self._name.encode() + b"\0" + key).digest()  # noqa: S324  no secret
        return int.from_bytes(digest[:8], "big", signed=True)

    def now(self, stamped: str) -> str:
        """Return the statement for the clock and the stamp, of which *stamped* are the columns."""
        return f"SELECT {CLOCK}, concat_ws(' ', {stamped})"

    def _snapshot(self, now: tuple[Any, ...], rows: Iterable[tuple[Any, ...]]) -> Snapshot:
        micros, stamp = now
        if stamp != self._stamp:
            self.close()
            msg = "another server is the database now, its table is another one, or it has crashed"
            raise Broken(msg)
        return Snapshot(
            micros,
            [
                Row(bytes(key), bytes(part), kind, bytes(value), e)
                for key, part, kind, value, e in rows
            ],
        )

    # -- hints -------------------------------------------------------------------------

    def tell(self, told: Iterable[tuple[bytes, bytes]]) -> list[str]:
        return [
            f"SELECT pg_notify('{self._channel(channel)}', '{message.hex()}')"
            for channel, message in told
        ]

    def _channel(self, channel: bytes) -> str:
        told = self.table.encode() + b"\0" + channel
        return f"redlock_{hashlib.sha1(told).hexdigest()}"  # noqa: S324  no secret

    def listen(self, channel: bytes) -> bool:
        if not self.hears:
            return False
        name = self._channel(channel)
        self.run(f"LISTEN {name}")
        with contextlib.suppress(Broken, Busy):  # as of a pooler that has none left for it
            another = Postgres(self._url, "", self._name)
            with contextlib.closing(another), in_time(another, ECHO):
                another.run(f"NOTIFY {name}")
        ends = time.monotonic() + ECHO
        while not (is_heard := bool(self._arrived())) and time.monotonic() < ends:
            time.sleep(0.02)
        return is_heard

    def _arrived(self) -> list[str]:
        """Return what has been told; also of what came with the answer to something else."""
        connection = self._connection.pgconn
        try:
            connection.consume_input()
        except psycopg.Error as error:
            raise Broken(str(error)) from None
        while (one := connection.notifies()) is not None:
            self._told.append(one.extra.decode())
        found, self._told = self._told, []
        return found

    def heard(self) -> list[bytes]:
        return [bytes.fromhex(one) for one in self._arrived() if one]

    def fileno(self) -> int:
        return self._connection.fileno()

    # -- the end -----------------------------------------------------------------------

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error, OSError):
            self._connection.close()

    def hang_up(self) -> None:
        with (
            contextlib.suppress(psycopg.Error, OSError),
            socket.socket(fileno=os.dup(self._connection.fileno())) as line,
        ):
            line.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        with contextlib.suppress(psycopg.Error, OSError):
            os.close(self._connection.fileno())


def words_of(error: Exception) -> str:
    """Return what went wrong, without the statement."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    said = " ".join((primary or str(error)).split())
    if isinstance(error, errors.InsufficientPrivilege) and DENIED not in said:
        return f"{DENIED}: {said}"  # in the server's language, which advice cannot know
    return said


@contextlib.contextmanager
def in_time(store: Postgres, longest: float) -> Iterator[None]:
    """Hang up after a while: a pooler takes connections, and lets them wait for its database."""
    is_over = threading.Event()

    def hang_up() -> None:
        is_over.set()  # first: who waits hears of the end at once
        store.hang_up()

    timer = threading.Timer(longest, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Broken:
        if is_over.is_set():
            msg = f"it was connected, but has not answered for {longest:g} s"
            raise Broken(msg) from None
        raise
    finally:
        timer.cancel()
        timer.join()  # or it might hang up on whoever has the descriptor next


def connected(url: str, schema: str, name: str, *, is_polled: bool, is_async: bool) -> Postgres:
    """Connect; raises `Broken` if the database is away, and `Unfit` if it is no lock node."""
    store = Postgres(url, schema, name)
    try:
        with in_time(store, LONGEST):
            store.meet(schema, name, is_polled=is_polled, is_async=is_async)
    except BaseException:
        store.close()
        raise
    return store


def make_tables(url: str, schema: str, name: str) -> bool:
    """Return whether the tables were missing, and are made; raises `Broken` if that cannot be."""
    with contextlib.closing(Postgres(url, schema, name)) as store, in_time(store, LONGEST):
        if has_tables(store, schema, name):
            return False  # and nothing is written, which this user may be forbidden
        one_at_a_time = f"SELECT pg_advisory_xact_lock({store.lock_of(META)})"
        store.run(one_at_a_time, *tables(schema, name))
        return True
