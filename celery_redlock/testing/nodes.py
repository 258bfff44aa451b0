"""
A lock node in memory: the Lua scripts of `celery_redlock.lock` told again in Python.

That both say the same is checked by the project's own tests, which tell real servers of each kind
and this one the same. Told again are the scripts of locks, of markers of executions that have
finished and, in `celery_redlock.testing.markers`, of queued markers; not those of beat's slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import NoScriptError, OutOfMemoryError, ResponseError

from celery_redlock.lock.scripts import (
    ACQUIRE,
    BOOT_RETENTION,
    ENROL,
    INSPECT,
    MARK,
    PROBE,
    RELEASE,
    RENEW,
    Script,
)
from celery_redlock.lock.votes import OWNER_LENGTH, TOKEN_LENGTH
from celery_redlock.reading.journal import RECORD

__all__ = ["NodeModel", "NotToldAgain"]

REMEMBERED = b"%d" % BOOT_RETENTION
TOLD_AGAIN = (ACQUIRE, RENEW, RELEASE, ENROL, MARK, INSPECT, PROBE, RECORD)
Store = dict[bytes, tuple[bytes, float]]


class NotToldAgain(NotImplementedError):
    """A node in memory was asked what only a real server can answer."""


class NodeModel:
    """
    What one lock node stores and answers, over a dict with expiry.

    Args:
        position: Among the nodes.
        wall: Its wall clock [s, Unix time].

    Attributes:
        store: Key -> value, and when it expires [ms, its own clock].
        boots: How often it was started again.
        is_up: Whether it takes connections.
        is_full: Whether it refuses to write.
        records: What was written to its journal, as JSON.
        scripts: What it was told of scripts.
        history: Its replication id; another one after it was a replica.
        has_followed: Whether it was a replica since it was started.
    """

    def __init__(self, position: int, wall: Callable[[], float]) -> None:
        self.position = position
        self.wall = wall
        self.store: Store = {}
        self.boots = 0
        self.is_up = True
        self.is_full = False
        self.records: list[bytes] = []
        self.verbs = {
            ACQUIRE.sha: self.acquire,
            RENEW.sha: self.renew,
            RELEASE.sha: self.release,
            ENROL.sha: self.enrol,
            MARK.sha: self.mark,
            INSPECT.sha: self.inspect,
            PROBE.sha: self.probe,
            RECORD.sha: self.record,
        }
        self.sources = {script.source: script.sha for script in TOLD_AGAIN}
        self.scripts = set(self.verbs)
        self.history, self.has_followed = self.run_id, False
        self._is_in_script = self._has_written = False

    # -- as a server -------------------------------------------------------------

    @property
    def run_id(self) -> bytes:
        """Another one after every restart; 40 characters."""
        return b"%02d%038d" % (self.position, self.boots)

    def now_ms(self) -> float:
        """Return the node's wall clock [ms]."""
        return self.wall() * 1000.0

    def get(self, key: bytes) -> bytes | None:
        """Return a value, or None if there is none any more."""
        value, expires = self.store.get(key, (None, 0.0))
        return value if expires > self.now_ms() else None

    def put(self, key: bytes, value: bytes, ttl: bytes) -> None:
        """Store a value for *ttl* [ms]; a script that has written may go on though it is full."""
        self.may_write()
        self.store[key] = (value, self.now_ms() + int(ttl))

    def may_write(self) -> None:
        """Raise OutOfMemoryError if nothing can be stored."""
        if self.is_full and not self._has_written:
            raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
        self._has_written = self._is_in_script

    def expire(self, key: bytes, ttl: bytes) -> None:
        """Have a key that exists stand for *ttl* [ms]; possible though the node is full."""
        self._has_written = self._is_in_script
        value = self.get(key)
        if value is not None:
            self.store[key] = (value, self.now_ms() + int(ttl))

    def pttl(self, key: bytes) -> int:
        """Return for how long a key stands yet [ms], -2 for none, -1 for one without an end."""
        if self.get(key) is None:
            return -2
        left = self.store[key][1] - self.now_ms()
        return -1 if left == float("inf") else int(left)

    def delete(self, key: bytes) -> None:
        """Take a key away; possible though the node is full."""
        self._has_written = self._is_in_script
        self.store.pop(key, None)

    def flush(self) -> None:
        """Lose all data, and go on as the same process."""
        self.store.clear()

    def forget_scripts(self) -> None:
        """Lose all scripts, as by SCRIPT FLUSH."""
        self.scripts.clear()

    def crash(self, kept: Store | None = None) -> None:
        """Lose all memory, or all but what was *kept* in a file, and end all connections."""
        self.is_up = False
        self.boots += 1
        self.store = dict(kept or {})
        self.is_full = False
        self.records = []
        self.history, self.has_followed = self.run_id, False
        self.forget_scripts()

    def follow(self, copy: Store, history: bytes) -> None:
        """Have what another server has, as its replica, and be a master again; in one process."""
        self.store = dict(copy)
        self.history, self.has_followed = history, True

    def greet(self) -> None:
        """Learn all scripts, as from every client that connects."""
        self.scripts |= set(self.verbs)

    def check_known(self, script: Script) -> None:
        """Raise NotToldAgain if this node cannot do what *script* does."""
        if script.sha not in self.verbs:
            msg = (
                "nodes in memory know locks and queued markers, but not the slots of beat; use "
                "real servers here (the fixture redlock_servers)"
            )
            raise NotToldAgain(msg)

    def execute(self, command: Sequence[bytes]) -> Any:
        """Return the reply to a command, as a Redis client reads it; errors are replies, too."""
        try:
            if command[0] == b"SET":
                self.put(command[1], command[2], command[4])
                return b"OK"
            verb, script, count, *rest = command
            sha = script if verb == b"EVALSHA" else self.sources[script]
            if verb == b"EVALSHA" and sha not in self.scripts:
                return NoScriptError("No matching script.")
            self.scripts.add(sha)
            self._is_in_script = True
            return self.verbs[sha](rest[: int(count)], rest[int(count) :])
        except OutOfMemoryError as error:
            return error
        except ValueError as error:  # somebody stored a fence that is no number
            return ResponseError(str(error))
        finally:
            self._is_in_script = self._has_written = False

    # -- the scripts -------------------------------------------------------------

    def standing(self, boot: bytes, quarantine: bytes, boot_id: bytes, length: bytes) -> Any:
        """As GUARD: 1 if the node may vote, else why not and for how long [ms]."""
        if length == b"0":
            return 1, 0
        found = self.get(boot)
        held_back = self.get(quarantine) is not None
        if found != boot_id:
            if self.is_foreign(found, boot_id):
                return -6, 0
            self.put(boot, boot_id, REMEMBERED)
            self.put(quarantine, b"1", length)
            held_back = True
        return (-2, self.pttl(quarantine)) if held_back else (1, 0)

    def was_replica(self, boot: bytes) -> bool:
        """As in HISTORY: whether it was one since it was asked last."""
        key = boot + b":history"
        known = self.get(key)
        if known == self.history:
            return False
        self.put(key, self.history, REMEMBERED)
        return known is not None and self.has_followed

    def is_foreign(self, found: bytes | None, boot_id: bytes) -> bool:
        """Return whether this very process was enrolled for clients of other settings."""
        return found is not None and found != boot_id and found[:41] == boot_id[:41]

    def last_fence(self, key: bytes) -> bytes:
        """Return the last fence given; to count on it is a float, as in Lua: exact up to 2^53."""
        value = self.get(key)
        return b"0" if value is None else value

    def acquire(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As ACQUIRE_LUA."""
        lock, fence_key, marker_key, boot, quarantine = keys
        token, info, ttl, proposed, retention, skew, length, boot_id = arguments
        now = int(self.now_ms())
        marker = self.get(marker_key) if marker_key != lock else None
        held = self.get(lock)
        code, left = self.standing(boot, quarantine, boot_id, length)
        if code != 1:
            return [code, now, left]
        if marker is not None:
            return [-3, now, marker]
        if held is not None and held[:TOKEN_LENGTH] != token:
            return [0, now, self.pttl(lock), held, self.last_fence(fence_key)]
        fence = b"0"
        if proposed != b"0":
            if self.is_too_far(float(proposed), now + int(skew)):
                return [-5, now]
            seen = float(self.last_fence(fence_key))
            if self.is_out_of_bounds(seen + 1, now + int(skew)):
                return [-7, now]
            fence = b"%.0f" % self.next_fence(seen, float(proposed))
            self.put(fence_key, fence, retention)
        self.put(lock, token + info, ttl)
        if length != b"0":
            self.expire(boot, REMEMBERED)
        return [1, now, fence]

    def is_too_far(self, proposed: float, latest: int) -> bool:
        """Return whether a proposal is made by a clock that is ahead of *latest* [ms]."""
        return proposed > latest * 4096

    def is_out_of_bounds(self, fence: float, latest: int) -> bool:
        """Return whether no clock up to *latest* [ms] can have made a fence; NaN is such a one."""
        return not fence <= latest * 4096

    def next_fence(self, seen: float, proposed: float) -> float:
        """Return the fence of a grant: above all that were given."""
        return max(seen + 1, proposed)

    def renew(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As RENEW_LUA."""
        lock, fence_key, boot, quarantine = keys
        token, info, ttl, least, retention, skew, repair, length, boot_id = arguments
        now = int(self.now_ms())
        held = self.get(lock)
        code, left = self.standing(boot, quarantine, boot_id, length)
        seen = float(self.last_fence(fence_key)) if least != b"0" else 0.0
        is_ours = seen == float(least)
        if not is_ours and self.is_out_of_bounds(max(seen, float(least)), now + int(skew)):
            return [-7, now]
        kind = 1
        if held is None and repair == b"1" and not self.has_passed(seen, float(least)):
            kind = 2
        elif held is None or not self.is_holder(held, token):
            return [0, now, self.pttl(lock), held or b"", self.last_fence(fence_key)]
        self.put(lock, token + info, ttl)
        fence = b"0"
        if least != b"0":
            fence = b"%.0f" % max(seen, float(least))
            self.put(fence_key, fence, retention)
        return self.renewed(kind, code, [now, fence], left, boot if length != b"0" else None)

    def has_passed(self, seen: float, fence: float) -> bool:
        """Return whether a larger fence than the one of a renewal was given since."""
        return 0 < fence < seen

    def is_holder(self, held: bytes, token: bytes) -> bool:
        """Return whether the value of a lock is that of whoever renews with *token*."""
        return held[:TOKEN_LENGTH] == token

    def renewed(
        self, kind: int, code: int, told: list[Any], left: int, boot: bytes | None
    ) -> list[Any]:
        """Return what a renewal that was stored counts for: nothing in quarantine."""
        if code != 1:
            return [code, told[0], left]
        if boot is not None:
            self.expire(boot, REMEMBERED)
        return [kind, *told]

    def release(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As RELEASE_LUA."""
        lock, marker_key = keys
        token, kept, state, marker_ttl = arguments
        held = self.get(lock)
        mine = held is not None and self.is_owner(held, token)
        if mine and kept == b"0":
            self.delete(lock)
        elif mine:
            self.expire(lock, kept)
        if marker_key != lock and not self.is_done(self.get(marker_key), state):
            self.put(marker_key, state, marker_ttl)
        return [1 if mine else 0, 0]

    def is_done(self, marker: bytes | None, state: bytes) -> bool:
        """Return whether a marker says more than *state* does."""
        return marker == b"done" and state != b"done"

    def is_owner(self, held: bytes, token: bytes) -> bool:
        """Return whether the value of a lock begins with *token*, or with its owner's part."""
        return len(token) >= OWNER_LENGTH and held.startswith(token)

    def enrol(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As ENROL_LUA."""
        (boot, quarantine), (boot_id, length, mode) = keys, arguments
        now = int(self.now_ms())
        found = self.get(boot)
        if mode == b"bootstrap":
            self.put(boot, boot_id, REMEMBERED)
            self.was_replica(boot)
            self.delete(quarantine)
            return [b"enrolled", now, 0, boot_id]
        if found is None and mode == b"look":
            return [b"unmarked", now, 0, b""]
        if found is None and mode == b"trust":
            self.put(boot, boot_id, REMEMBERED)
        elif found is not None and self.is_of_others(found, boot_id):
            return [b"foreign", now, 0, found]
        if self.was_replica(boot):
            self.put(quarantine, b"1", length)
        found = self.get(boot)
        _, left = self.standing(boot, quarantine, boot_id, length)
        return [b"enrolled", now, left, found or b""]

    def is_of_others(self, found: bytes, boot_id: bytes) -> bool:
        """Return whether a node was enrolled for clients of other settings."""
        return found[40:] != boot_id[40:]

    def mark(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As MARK_LUA."""
        state, ttl = arguments
        if ttl == b"0":
            if self.get(keys[0]) == state:
                self.delete(keys[0])
        else:
            self.put(keys[0], state, ttl)
        return [1, 0]

    def inspect(self, keys: Sequence[bytes], _: Sequence[bytes]) -> list[Any]:
        """As INSPECT_LUA."""
        lock, fence_key = keys
        now = int(self.now_ms())
        held, fence = self.get(lock), self.last_fence(fence_key)
        if held is None:
            return [2, now, fence]
        return [0, now, self.pttl(lock), held, fence]

    def record(self, _: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As RECORD_LUA, but for when records are dropped."""
        self.records.append(arguments[0])
        return [1, 0]

    def probe(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As PROBE_LUA."""
        boot, quarantine, written = keys
        length, boot_id = arguments
        now = int(self.now_ms())
        self.put(written, b"1", b"1000")
        if length != b"0" and self.was_replica(boot):
            self.put(quarantine, b"1", length)
        code, left = self.standing(boot, quarantine, boot_id, length)
        if code != 1:
            return [code, now, left]
        if length != b"0":
            self.remember(boot)
        return [1, now, b"0"]

    def remember(self, boot: bytes) -> None:
        """Remember for another month that the node is enrolled, though nobody takes a lock."""
        self.expire(boot, REMEMBERED)
        self.expire(boot + b":history", REMEMBERED)
