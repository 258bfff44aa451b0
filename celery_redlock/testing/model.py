"""A lock node in memory: what a Redis server is to its clients, apart from connections."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import RedisError

from celery_redlock.lock.scripts.scripting import registered
from celery_redlock.process.forks import around_fork
from celery_redlock.testing import lua
from celery_redlock.testing.commands import COMMANDS, Command
from celery_redlock.testing.keyspace import Keyspace, Store
from celery_redlock.testing.values import OK, Refused, Status

__all__ = ["NodeModel", "Store"]

BUSY = "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."
DENIED = "ERR The user executing the script can't run this command or subcommand"
FULL = "OOM command not allowed when used memory > 'maxmemory'."


#: Whose command is being done: one at a time, also of several nodes, which share an interpreter.
_turn = threading.RLock()


class NodeModel:
    """
    What one lock node stores and answers.

    Args:
        position: Among the nodes.
        wall: Its wall clock [s, Unix time].

    Attributes:
        boots: How often it was started again.
        denied: The commands that its clients may not use, in capitals.
        scripts: Digest -> script that it has loaded.
        history: Its replication id; another one after it was a replica.
        has_followed: Whether it was a replica since it was started.
        evicted: How many keys it has evicted since then.
    """

    def __init__(self, position: int, wall: Callable[[], float]) -> None:
        self.position = position
        self.wall = wall
        self.keyspace = Keyspace()
        self.keyspace.info = self._info
        self.boots = 0
        self.is_up = True
        self.is_full = self.is_busy = self.is_replica = False
        self.denied: frozenset[bytes] = frozenset()
        self.scripts: dict[bytes, lua.Script] = {}
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

    def forget_scripts(self) -> None:
        self.scripts.clear()

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
        with _turn:
            for script in registered():
                self.scripts[script.sha] = lua.compiled(script.source)

    # -- what it is asked --------------------------------------------------------------

    def ask(self, *command: bytes) -> Any:
        reply = self.execute(command)
        if isinstance(reply, RedisError):
            raise reply
        return reply

    def execute(self, command: Sequence[bytes]) -> Any:
        """Return the reply, as redis-py reads it; errors are replies, too. One at a time."""
        with _turn:
            self.keyspace.micros = int(self.wall() * 1_000_000 + 0.5)
            try:
                reply = self._do(command[0].upper(), command[1:])
            except Refused as refused:
                return refused.reply
        return bytes(reply) if type(reply) is Status else reply

    def _do(self, name: bytes, words: Sequence[bytes]) -> Any:
        if self.is_busy:
            raise Refused(BUSY)
        if name in self.denied:
            denied = name.decode().lower()
            raise Refused(f"NOPERM this user has no permissions to run the '{denied}' command")
        if name in (b"EVALSHA", b"EVAL"):
            script, keys, *words = words
            return self._run(script if name == b"EVALSHA" else self._load(script), keys, words)
        if name == b"SCRIPT":
            return self._of_scripts(*words)
        if name == b"FLUSHALL":
            self.flush()
            return OK
        if name not in COMMANDS:
            echo = "".join(f"'{word.decode(errors='replace')}' " for word in words)
            raise Refused(
                f"ERR unknown command '{name.decode()}', with args beginning with: {echo}"
            )
        command = COMMANDS[name]
        if not command.fits(words):
            raise Refused(f"ERR wrong number of arguments for '{name.decode().lower()}' command")
        self._has_written = False
        if command.writes:
            self._may_write(command)
        return command.do(self.keyspace, *words)

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

    # -- scripts -----------------------------------------------------------------------

    def _of_scripts(self, what: bytes, *words: bytes) -> Any:
        if what.upper() == b"LOAD":
            return self._load(*words)
        self.forget_scripts()
        return OK

    def _load(self, source: bytes) -> bytes:
        digest = hashlib.sha1(source).hexdigest().encode()  # noqa: S324  Redis names scripts so
        if digest not in self.scripts:
            self.scripts[digest] = lua.compiled(source)
        return digest

    def _run(self, digest: bytes, keys: bytes, words: Sequence[bytes]) -> Any:
        script = self.scripts.get(digest)
        if script is None:
            raise Refused("NOSCRIPT No matching script.")
        self._has_written = False
        return lua.run(script, self._call, int(keys), words)

    def _call(self, *words: Any) -> Any:
        try:
            return lua.crossing(self._called(*words))
        except Refused as refused:
            return (lua.ERROR, str(refused).encode())

    def _called(self, name: Any = None, *words: Any) -> Any:
        command = COMMANDS.get(name) or self._known(name)
        if not command.fits(words):
            raise Refused("ERR Wrong number of args calling Redis command from script")
        if self.denied and name.upper() in self.denied:
            raise Refused(DENIED)
        if command.writes:
            self._may_write(command)
        for word in words:
            if type(word) is not bytes:
                words = tuple(map(text_of, words))
        return command.do(self.keyspace, *words)

    def _known(self, name: Any) -> Command:
        if name is None:
            raise Refused("ERR Please specify at least one argument for this redis lib call")
        command = COMMANDS.get(text_of(name).upper())
        if command is None:
            raise Refused("ERR Unknown Redis command called from script")
        return command


def text_of(word: Any) -> bytes:
    """Return an argument from Lua as Redis takes it; raises Refused where Redis would."""
    if type(word) is bytes:
        return word
    if type(word) is int:
        return b"%d" % word
    if type(word) is float:
        return b"%.17g" % word
    raise Refused("ERR Lua redis lib command arguments must be strings or integers")


# A child must not inherit the turn of a thread that it lacks.
around_fork("nodes in memory", _turn.release, before=_turn.acquire, in_parent=_turn.release)
