"""
A lock node in memory that knows queued markers: `celery_redlock.unique.scripts` told again.

That both say the same is checked as for `celery_redlock.testing.nodes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from celery_redlock.lock.votes import OWNER_LENGTH, TOKEN_LENGTH
from celery_redlock.testing.nodes import REMEMBERED, NodeModel, Store
from celery_redlock.unique.scripts import END, ENQUEUE, START

__all__ = ["MarkerNode"]

Fields = dict[bytes, bytes]


class Marker(NamedTuple):
    """One marker as the scripts read it; without a token there is none. Times [ms, the node's]."""

    key: bytes
    token: bytes = b""
    info: bytes = b""
    alone: float = 0
    window: float = 0
    lock: bytes = b""
    started: bytes = b""
    version: float = 0
    merged: int = 0
    by: bytes | None = None

    def left(self, now: int) -> int:
        """Return for how long it stands by itself yet [ms]."""
        return int(max(0, self.alone - now))

    def stands(self, now: int, lock: bytes | None) -> bool:
        """Return whether it stands, by itself or by the *lock* that its task runs under."""
        return self.alone > now or self.runs(lock)

    def runs(self, lock: bytes | None) -> bool:
        """Return whether its task holds *lock*."""
        return bool(self.lock) and lock is not None and lock[:TOKEN_LENGTH] == self.lock


class MarkerNode(NodeModel):
    """
    What one lock node stores and answers, queued markers included.

    Attributes:
        hashes: Key -> fields, and when it expires [ms, its own clock].
    """

    def __init__(self, position: int, wall: Callable[[], float]) -> None:
        super().__init__(position, wall)
        self.hashes: dict[bytes, tuple[Fields, float]] = {}
        told = ((ENQUEUE, self.enqueue), (START, self.start), (END, self.end))
        self.verbs |= {script.sha: verb for script, verb in told}
        self.sources |= {script.source: script.sha for script, _ in told}
        self.greet()

    def flush(self) -> None:
        """As `NodeModel.flush`."""
        super().flush()
        self.hashes.clear()

    def crash(self, kept: Store | None = None) -> None:
        """As `NodeModel.crash`; no hash is kept."""
        super().crash(kept)
        self.hashes.clear()

    # -- hashes, as a server has them ----------------------------------------------

    def fields(self, key: bytes) -> Fields:
        """Return a hash; empty if there is none any more."""
        fields, expires = self.hashes.get(key, ({}, 0.0))
        return fields if expires > self.now_ms() else {}

    def set_fields(self, key: bytes, fields: Fields) -> None:
        """Set *fields* of a hash, which goes on standing as long as it does."""
        self.may_write()
        found = self.fields(key)
        expires = self.hashes[key][1] if found else float("inf")
        self.hashes[key] = ({**found, **fields}, expires)

    def keep_hash(self, key: bytes, ttl: float) -> None:
        """Have a hash that exists stand for *ttl* [ms]."""
        self._has_written = self._is_in_script
        if self.fields(key):
            # In whole milliseconds, as on a server: what is set anew again and again loses nothing.
            self.hashes[key] = (self.hashes[key][0], int(self.now_ms()) + ttl)

    def rest_of(self, key: bytes) -> int:
        """Return for how long a hash stands yet [ms], -2 for none."""
        return int(self.hashes[key][1] - int(self.now_ms())) if self.fields(key) else -2

    def drop(self, key: bytes) -> None:
        """Take a hash away."""
        self._has_written = self._is_in_script
        self.hashes.pop(key, None)

    def rename(self, key: bytes, to: bytes) -> None:
        """Have a hash under another key."""
        self._has_written = self._is_in_script
        self.hashes[to] = self.hashes.pop(key)

    # -- the scripts -----------------------------------------------------------------

    def read(self, key: bytes) -> Marker:
        """Return the marker at *key*."""
        told = self.fields(key)
        if b"token" not in told:
            return Marker(key)
        return Marker(
            key,
            told[b"token"],
            told.get(b"info", b""),
            float(told.get(b"until", 0)),
            float(told.get(b"window", 0)),
            told.get(b"lock", b""),
            told.get(b"started", b""),
            float(told.get(b"version", 0)),
            int(told.get(b"merged", 0)),
            told.get(b"by"),
        )

    def write(self, marker: Marker, *, life: float) -> None:
        """Put *marker* in the place of whatever stands at its key, for *life* [ms]."""
        if self.read(marker.key).token:
            self.drop(marker.key)
        self.set_fields(
            marker.key,
            {
                b"token": marker.token,
                b"info": marker.info,
                b"until": whole(marker.alone),
                b"window": whole(marker.window),
                b"started": marker.started,
            },
        )
        self.keep_hash(marker.key, life)

    def enqueue(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As ENQUEUE_LUA."""
        lock_key, boot, quarantine = keys[2:]
        token, call, length, boot_id = arguments[0], arguments[5], *arguments[8:]
        now, lock = int(self.now_ms()), self.get(lock_key)
        code, wait = self.standing(boot, quarantine, boot_id, length)
        if code != 1:
            return [code, now, wait]
        current, following = self.read(keys[0]), self.read(keys[1])
        is_others = current.token != token and current.stands(now, lock)
        if is_others and not call:
            return self._refuse(current, now, lock_key)
        if following.token != token and following.stands(now, None):
            refuse = self._merge if call else self._refuse_next
            return refuse(following, now, lock_key, arguments)
        if is_others and not current.started:
            return self._merge(current, now, lock_key, arguments)
        if is_others:
            return self._place(following, 3, current, now, boot, arguments)
        if following.token == token:
            self.rename(keys[1], keys[0])
            current = following
        return self._place(current, 1, current, now, boot, arguments)

    def _place(
        self,
        old: Marker,
        how: int,
        before: Marker,
        now: int,
        boot: bytes,
        arguments: Sequence[bytes],
    ) -> list[Any]:
        token, info, life, window, started = arguments[:5]
        later = before.left(now) + 1000 if how == 3 else 0  # noqa: PLR2004  the script's code
        if old.token != token:
            lasting = later + int(life)
            shown = now + later + int(window)
            new = Marker(old.key, token, info, now + lasting, shown, started=started)
            self.write(new, life=lasting)
        if arguments[8] != b"0":
            self.expire(boot, REMEMBERED)
        return [how, now, b"0", before.left(now), before.token + before.info, 0]

    def _refuse(self, marker: Marker, now: int, lock_key: bytes) -> list[Any]:
        ttl = max(marker.left(now), self.pttl(lock_key) if marker.lock else 0)
        return [0, now, ttl, marker.token + marker.info, b"0"]

    def _refuse_next(
        self, marker: Marker, now: int, lock_key: bytes, _: Sequence[bytes]
    ) -> list[Any]:
        return self._refuse(marker, now, lock_key)

    def _merge(
        self, marker: Marker, now: int, lock_key: bytes, arguments: Sequence[bytes]
    ) -> list[Any]:
        if marker.started:
            return self._refuse(marker, now, lock_key)
        version, merged, mine = float(arguments[6]), marker.merged, arguments[0][:OWNER_LENGTH]
        who, left = marker.token + marker.info, marker.left(now)
        if version <= marker.version:
            return [4, now, whole(marker.version + 1), left, who, merged]
        merged += marker.by != mine
        newest = {b"newest": arguments[5], b"version": whole(version)}
        self.set_fields(marker.key, {**newest, b"merged": whole(merged), b"by": mine})
        if self.rest_of(marker.key) < int(arguments[7]):
            self.keep_hash(marker.key, int(arguments[7]))
        return [4, now, whole(version), left, who, merged]

    def start(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As START_LUA."""
        token, info, _, execution, alone, life, kept = arguments
        at, now = keys[0], int(self.now_ms())
        mine, following = self.read(at), self.read(keys[1])
        if mine.token != token:
            is_others = mine.stands(now, self.get(keys[2]))
            if following.token == token:
                if is_others:
                    return [0, now, mine.left(now), mine.token + mine.info, b"0"]
                mine = following
                self.rename(keys[1], at)
                if alone == b"as it is":
                    window = whole(now + int(life))
                    self.set_fields(at, {b"until": window, b"window": window})
                    self.keep_hash(at, max(int(life), self.rest_of(at)))
            elif is_others or following.token or alone in (b"as it is", b"over"):
                return [5, now]
            else:
                new = Marker(at, token, info, now + float(alone), now, started=execution)
                self.write(new, life=int(kept))
                mine = self.read(at)
        is_first = mine.started in (b"", execution)
        newest = self.fields(at).get(b"newest", b"") if is_first else b""
        if alone == b"over":
            self.drop(at)
        else:
            self._note_start(mine, at, now, arguments)
        return [1, now, whole(mine.version), newest, mine.merged]

    def _note_start(self, mine: Marker, at: bytes, now: int, arguments: Sequence[bytes]) -> None:
        lock_token, execution, alone, _, kept = arguments[2:]
        self.set_fields(at, {b"lock": lock_token})
        if mine.started in (b"", b"-"):
            self.set_fields(at, {b"started": execution})
        if alone != b"as it is":
            self.set_fields(at, {b"until": whole(now + float(alone))})
            self.keep_hash(at, int(kept))

    def end(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> list[Any]:
        """As END_LUA."""
        token, how, life = arguments
        now, lock, ended = int(self.now_ms()), self.get(keys[2]), 0
        for key in keys[:2]:
            marker = self.read(key)
            has_run = marker.started not in (b"", b"-")
            spared = (how == b"idle" and marker.runs(lock)) or (how == b"unstarted" and has_run)
            if marker.token == token and not spared:
                ended = 1
                self._end(marker, how, int(life), now)
        return [ended, 0]

    def _end(self, marker: Marker, how: bytes, life: int, now: int) -> None:
        key = marker.key
        if how == b"ran":
            if not marker.started:
                self.set_fields(key, {b"started": b"-"})
        elif how == b"hand":
            self.set_fields(key, {b"until": whole(now + life)})
            self.keep_hash(key, max(life, self.rest_of(key)))
        elif how == b"wait":
            alone = max(marker.alone, now + life)
            self.set_fields(key, {b"until": whole(alone)})
            self.keep_hash(key, max(alone - now, self.rest_of(key)))
        elif how == b"window" and marker.window > now:
            self.set_fields(key, {b"until": whole(marker.window), b"lock": b""})
            self.keep_hash(key, marker.window - now)
        else:
            self.drop(key)


def whole(number: float) -> bytes:
    """Return *number* as the scripts write it."""
    return b"%.0f" % number
