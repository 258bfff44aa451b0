"""
Script that reads locks for operators, and its replies.

The only one that does: for one lock, its places, or a page of all locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_redlock.lock.nodes.guard import read_as
from celery_redlock.lock.records import OWNER_LENGTH, TOKEN_LENGTH, Keys, object_in
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.scripting import Script, read_release
from celery_redlock.process.log import cut
from celery_redlock.reading.stored import StoredLock, StoredReservation
from celery_redlock.reading.waiters import recorded_waiters

__all__ = [
    "ABSENT",
    "ENDLESS",
    "EXPIRIES",
    "PAGE",
    "READ",
    "arguments_of_read",
    "read_commands",
    "read_replies",
    "read_stored",
    "with_ttl",
]

#: For how many locks a node is asked at once: well below a millisecond of its time.
PAGE = 100
#: How many of those who wait for one lock are read from each node.
MOST_WAITERS = 1000
#: So many who wait for a lock are looked at in any case [counted].
FEW = 100
#: Digits of the largest number that a script of ours writes, and a few more.
LONGEST_NUMBER = 20
#: What `EXPIRIES` says of a key that is not there, and of one that never expires.
ABSENT, ENDLESS = -2, -1

# KEYS locks ; ARGV 1 length of the prefix 'redlock:lock:' without 'lock:' 2 that prefix
#      3 how many of those who wait are wanted
# Answers the node's clock, whether it must not vote, and then, per lock: value, rest of its lease,
# fence, what stands in the reservations of its name, how many wait for it, of these, if there are
# many, the oldest that can be told, and the newest call of its burst. A key of another type is no
# lock, and blocks nobody (MGET passes over it, here and in ACQUIRE).
READ_LUA = f"""
local WHO, FEW = {OWNER_LENGTH}, {FEW}
"""
READ_LUA += """
local skip = tonumber(ARGV[1])
local t = redis.call('TIME')
local function fields(key)
  local m = redis.pcall('HMGET', key, 'token', 'info', 'until', 'lock', 'started', 'merged')
  return not m.err and m[1] and m
end
local function waiters(key, line, many)
  if many <= math.max(FEW, tonumber(ARGV[3])) then
    local all = redis.pcall('HGETALL', key)
    return all.err and {} or all
  end
  local oldest, found = redis.pcall('ZRANGE', line, '0', string.format('%d', ARGV[3] - 1)), {}
  for i, one in ipairs(oldest.err and {} or oldest) do
    local who = string.sub(one, 1, WHO)
    found[2 * i - 1], found[2 * i] = who, redis.call('HGET', key, who) or ''
  end
  return found
end
local quarantined = redis.call('EXISTS', ARGV[2] .. 'node:quarantine')
local names, fences, found = {}, {}, {t[1] * 1000 + math.floor(t[2] / 1000), quarantined}
for i, key in ipairs(KEYS) do
  names[i] = string.sub(key, skip + 6)
  fences[i] = ARGV[2] .. 'fence:' .. names[i]
end
local values = redis.call('MGET', unpack(KEYS))
fences = redis.call('MGET', unpack(fences))
for i, key in ipairs(KEYS) do
  local queued, next = ARGV[2] .. 'queued:' .. names[i], ARGV[2] .. 'next:' .. names[i]
  local is_reserved = redis.call('EXISTS', queued, next) > 0
  local waiting = ARGV[2] .. 'waiters:' .. names[i]
  local many = redis.pcall('HLEN', waiting)
  local burst = redis.pcall('HMGET', ARGV[2] .. 'debounce:' .. names[i],
    'newest', 'task', 'deadline')
  local some_wait = type(many) == 'number' and many > 0
  found[i + 2] = {values[i], redis.call('PTTL', key), fences[i],
    is_reserved and fields(queued), is_reserved and fields(next), some_wait and many or 0,
    some_wait and waiters(waiting, ARGV[2] .. 'line:' .. names[i], many) or {},
    not burst.err and burst[1] and burst}
end
return found
"""
READ = Script(READ_LUA, read_release, guarded=False, writes=False)

# KEYS ; answers for how long each is there yet
EXPIRIES_LUA = """
local found = {}
for i, key in ipairs(KEYS) do found[i] = redis.call('PTTL', key) end
return found
"""
EXPIRIES = Script(EXPIRIES_LUA, read_release, guarded=False, writes=False)


def read_commands(rules: Rules, names: Sequence[str]) -> list[Sequence[Any]]:
    pages = [names[begin : begin + PAGE] for begin in range(0, len(names), PAGE)]
    keys = [[Keys.of(rules.prefix, name).lock for name in page] for page in pages]
    return [
        (b"EVAL", READ.source, *arguments_of_read(page, rules.prefix, MOST_WAITERS))
        for page in keys
    ]


def read_replies(replies: Sequence[Any], count: int) -> list[StoredLock]:
    """Return *count* locks from *replies* to `read_commands`; raises redis.ResponseError."""
    found: list[StoredLock] = []
    for reply in replies:
        found += read_stored(reply, min(PAGE, count - len(found)))
    return found


def with_ttl(ttl: int, keys: Sequence[bytes], reply: Sequence[Any]) -> list[bytes]:
    return [key for key, found in zip(keys, reply, strict=True) if found == ttl]


def arguments_of_read(keys: Sequence[bytes], prefix: str, most: int = 1) -> tuple[bytes, ...]:
    """Return the arguments of `READ` for the locks at *keys*, and *most* waiters of each."""
    begin = f"{prefix}:".encode()
    return (b"%d" % len(keys), *keys, b"%d" % len(begin), begin, b"%d" % most)


def read_stored(reply: Any, count: int) -> list[StoredLock]:
    """Return the locks in a reply of `READ`, one per key; raises redis.ResponseError."""

    def read(reply: Any) -> list[StoredLock]:
        now, quarantined, *locks = reply
        if len(locks) != count:
            raise ValueError
        found = [stored(int(now), fields) for fields in locks]
        return [one._replace(is_quarantined=True) for one in found] if quarantined else found

    return read_as("locks", read, reply)


def stored(now: int, fields: Sequence[Any]) -> StoredLock:
    """Return what a node stores of a lock; *now* is its clock [ms]."""
    value, ttl, fence, queued, following, many, waiting, burst = fields
    waiters = recorded_waiters(waiting, now / 1000.0)
    is_all = 2 * int(many) <= len(waiting)
    if not (value is None or isinstance(value, bytes)):
        raise TypeError
    return StoredLock(
        value,
        None if ttl == -1 else max(0, ttl) / 1000.0,
        number(fence) if fence else 0,
        reservation_in(queued, now, value) if queued else None,
        reservation_in(following, now, value) if following else None,
        len(waiters) if is_all else int(many),
        waiters,
        burst=burst_in(burst, now) if burst else None,
    )


def reservation_in(
    fields: Sequence[bytes | None], now: int, lock: bytes | None
) -> StoredReservation | None:
    token, info, until, under, started, merged = (value or b"" for value in fields)
    left = (number(until) - now) / 1000.0
    holds = bool(under) and (lock or b"")[:TOKEN_LENGTH] == under
    if not token or (left <= 0 and not holds):
        return None
    return StoredReservation(
        token,
        object_in(info),
        max(0.0, left),
        is_running=holds or started not in (b"", b"-"),
        merged=number(merged),
        has_run=started == b"-",
    )


def burst_in(fields: Sequence[bytes | None], now: int) -> StoredReservation | None:
    newest, task, until = (value or b"" for value in fields)
    left = (number(until) - now) / 1000.0
    if not newest or left <= 0:
        return None
    info = {"task_id": cut(task.decode(errors="replace"))}
    return StoredReservation(newest, info, left, is_running=False, merged=0, is_burst=True)


def number(digits: bytes) -> int:
    """Return the number in *digits*, 0 if somebody else wrote it."""
    return int(digits) if digits.isdigit() and len(digits) <= LONGEST_NUMBER else 0
