"""Answer commands and run scripts over a `Keyspace`, one at a time, as a Redis server does."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from celery_redlock.keyspace import lua
from celery_redlock.keyspace.commands import COMMANDS, Command
from celery_redlock.keyspace.keys import Keyspace
from celery_redlock.keyspace.values import Refused, Status
from celery_redlock.process.forks import around_fork

__all__ = ["Engine"]

DENIED = "ERR The user executing the script can't run this command or subcommand"

#: Whose command is being done: one at a time, also of several nodes, which share an interpreter.
_turn = threading.RLock()


class Engine:
    """
    Answers commands and runs scripts over a keyspace.

    Attributes:
        keyspace: What there is; whoever has the engine sets its clock before each command.
        scripts: Digest -> script that was loaded.
        denied: The commands that its clients may not use, in capitals.
    """

    def __init__(self, keyspace: Keyspace) -> None:
        self.keyspace = keyspace
        self.scripts: dict[bytes, lua.Script] = {}
        self.denied: frozenset[bytes] = frozenset()

    def execute(self, command: Sequence[bytes]) -> Any:
        """Return the reply, as redis-py reads it; errors are replies, too. One at a time."""
        with _turn:
            self._begin()
            try:
                reply = self._do(command[0].upper(), command[1:])
            except Refused as refused:
                return refused.reply
        return bytes(reply) if type(reply) is Status else reply

    def ask(self, *command: bytes) -> Any:
        reply = self.execute(command)
        if isinstance(reply, RedisError):
            raise reply
        return reply

    def load(self, source: bytes) -> bytes:
        digest = hashlib.sha1(source).hexdigest().encode()  # noqa: S324  Redis names scripts so
        if digest not in self.scripts:
            with _turn:
                self.scripts[digest] = lua.compiled(source)
        return digest

    def forget_scripts(self) -> None:
        self.scripts.clear()

    # -- parts that a kind of node has of its own ----------------------------------------

    def _begin(self) -> None:
        """Get ready for a command."""

    def _may_write(self, command: Command) -> None:
        """Raise Refused if *command*, which writes, must not."""

    # ------------------------------------------------------------------------------------

    def _do(self, name: bytes, words: Sequence[bytes]) -> Any:
        if name in self.denied:
            denied = name.decode().lower()
            raise Refused(f"NOPERM this user has no permissions to run the '{denied}' command")
        if name in (b"EVALSHA", b"EVAL"):
            script, keys, *words = words
            return self._run(script if name == b"EVALSHA" else self.load(script), keys, words)
        if name == b"SCRIPT":
            return self._of_scripts(*words)
        if name not in COMMANDS:
            echo = "".join(f"'{word.decode(errors='replace')}' " for word in words)
            raise Refused(
                f"ERR unknown command '{name.decode()}', with args beginning with: {echo}"
            )
        command = COMMANDS[name]
        if not command.fits(words):
            raise Refused(f"ERR wrong number of arguments for '{name.decode().lower()}' command")
        if command.writes:
            self._may_write(command)
        return command.do(self.keyspace, *words)

    def _of_scripts(self, what: bytes, *words: bytes) -> Any:
        if what.upper() == b"LOAD":
            return self.load(*words)
        self.forget_scripts()
        return Status(b"OK")

    def _run(self, digest: bytes, keys: bytes, words: Sequence[bytes]) -> Any:
        script = self.scripts.get(digest)
        if script is None:
            raise Refused("NOSCRIPT No matching script.")
        if not keys.isdigit() or int(keys) > len(words):
            raise Refused("ERR value is not an integer or out of range")
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
around_fork("keyspace", _turn.release, before=_turn.acquire, in_parent=_turn.release)
