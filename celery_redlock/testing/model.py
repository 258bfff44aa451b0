"""A lock node in memory: what a Redis server is to its clients, apart from connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from celery_redlock.keyspace.commands import Command
from celery_redlock.keyspace.engine import Engine
from celery_redlock.keyspace.keys import Keyspace, Store
from celery_redlock.keyspace.values import OK, Refused
from celery_redlock.lock.scripts.scripting import registered

__all__ = ["NodeModel", "Store"]

BUSY = "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."
FULL = "OOM command not allowed when used memory > 'maxmemory'."


class NodeModel(Engine):
    """
    What one lock node stores and answers.

    Args:
        position: Among the nodes.
        wall: Its wall clock [s, Unix time].

    Attributes:
        boots: How often it was started again.
        history: Its replication id; another one after it was a replica.
        has_followed: Whether it was a replica since it was started.
        evicted: How many keys it has evicted since then.
    """

    def __init__(self, position: int, wall: Callable[[], float]) -> None:
        super().__init__(Keyspace())
        self.position = position
        self.wall = wall
        self.keyspace.info = self._info
        self.boots = 0
        self.is_up = True
        self.is_full = self.is_busy = self.is_replica = False
        self.history, self.has_followed, self.evicted = self.run_id, False, 0
        self._has_written = False

    @property
    def run_id(self) -> bytes:
        """Another one after every restart; 40 characters."""
        return b"%02d%038d" % (self.position, self.boots)

    @property
    def store(self) -> Store:
        """What it stores, and until when [ms, its own clock]."""
        return self.keyspace.store

    # -- its outcome --------------------------------------------------------------------

    def flush(self) -> None:
        self.store.clear()

    def crash(self, kept: Store | None = None) -> None:
        """Lose all memory, or all but what was *kept* in a file, and end all connections."""
        self.is_up = self.is_full = self.is_busy = False
        self.boots += 1
        self.keyspace.store = dict(kept or {})
        self.history, self.has_followed, self.evicted = self.run_id, False, 0
        self.forget_scripts()

    def follow(self, copy: Store, history: bytes) -> None:
        """Take over what another server has, as its replica, and be a master again."""
        self.keyspace.store = dict(copy)
        self.history, self.has_followed = history, True

    def evict(self, key: bytes) -> None:
        """Lose a key, as a server does whose memory is full."""
        if self.store.pop(key, None) is not None:
            self.evicted += 1

    def greet(self) -> None:
        for script in registered():
            self.load(script.source)

    # -- what it is asked --------------------------------------------------------------

    def _begin(self) -> None:
        self.keyspace.micros = int(self.wall() * 1_000_000 + 0.5)
        self._has_written = False

    def _do(self, name: bytes, words: Sequence[bytes]) -> Any:
        if self.is_busy:
            raise Refused(BUSY)
        if name == b"FLUSHALL" and name not in self.denied:
            self.flush()
            return OK
        return super()._do(name, words)

    def _may_write(self, command: Command) -> None:
        if self.is_replica:
            raise Refused("READONLY You can't write against a read only replica.")
        if self.is_full and command.grows and not self._has_written:
            raise Refused(FULL)
        self._has_written = True

    def _info(self, section: bytes) -> bytes:
        second = b"1" * 40 if self.has_followed else b"0" * 40
        sections: dict[bytes, tuple[bytes, ...]] = {
            b"stats": (b"# Stats", b"evicted_keys:%d" % self.evicted),
            b"replication": (
                b"# Replication",
                b"role:slave" if self.is_replica else b"role:master",
                b"master_replid:" + self.history,
                b"master_replid2:" + second,
            ),
        }
        asked = [section.lower()] if section else list(sections)
        found = (sections[name] for name in asked if name in sections)
        return b"\r\n".join(b"".join(line + b"\r\n" for line in lines) for lines in found)
