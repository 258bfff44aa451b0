"""Which keys a batch of commands needs, and which of them it writes: decided before it is run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from celery_redlock.keyspace.commands import COMMANDS
from celery_redlock.lock.database.loaded import EARS
from celery_redlock.lock.scripts.scripting import only_reads

__all__ = ["Plan", "plan_of"]

#: What ends the keys that every script looks at and few write: whoever looks lets others look.
SHARED = (b":boot", b":quarantine", b":boot:history")
#: Commands whose words are all keys.
OF_KEYS = (b"DEL", b"EXISTS", b"MGET", b"RENAME")


@dataclass(frozen=True)
class Plan:
    """The *keys* that are loaded, and those that are *written*: none where it only reads."""

    keys: frozenset[bytes]
    written: frozenset[bytes]
    only_reads: bool

    def with_key(self, key: bytes) -> Plan:
        """Return the plan for a batch that touches *key*, too."""
        is_written = not (self.only_reads or is_shared(key))
        written = self.written | ({key} if is_written else set())
        return replace(self, keys=self.keys | {key}, written=written)

    def with_written(self, changed: Iterable[bytes]) -> Plan:
        """Return the plan for a batch that has *changed* these, too."""
        more = frozenset(changed) - self.written
        if not more:
            return self
        others = frozenset(key for key in self.keys if not is_shared(key))
        return Plan(self.keys | more, self.written | more | others, only_reads=False)


def plan_of(commands: Sequence[Sequence[bytes]]) -> Plan:
    keys = frozenset(key for command in commands for key in keys_of(command))
    if all(map(reads, commands)):
        return Plan(keys, frozenset(), only_reads=True)
    return Plan(keys, frozenset(key for key in keys if not is_shared(key)), only_reads=False)


def reads(command: Sequence[bytes]) -> bool:
    name = command[0].upper()
    if name == b"EVALSHA":
        return only_reads(command[1])
    if name == b"EVAL":
        return only_reads(hashlib.sha1(command[1]).hexdigest().encode())  # noqa: S324  as Redis
    return name != b"PUBLISH" and not (name in COMMANDS and COMMANDS[name].writes)


def keys_of(command: Sequence[bytes]) -> Sequence[bytes]:
    """Return the keys that a command names; a word too many does no harm."""
    name, words = command[0].upper(), command[1:]
    if name in (b"EVAL", b"EVALSHA"):
        return words[2 : 2 + int(words[1])] if words[1:] and words[1].isdigit() else ()
    if name in OF_KEYS:
        return words
    return words[:1] if name in COMMANDS and COMMANDS[name].least else ()


def is_shared(key: bytes) -> bool:
    return key.endswith(SHARED) or key.startswith(EARS)
