"""
Who waits for a lock, as the nodes know them: noted when refused, woken when the lock is released.

Two sorted sets per lock name and node, which grant nothing and expire:

    redlock:waiting:NAME   who waits: id and description           -> when last heard of [ms]
    redlock:ready:NAME     tickets of those who can be woken:
                           token, channel and description          -> since when they wait [ms]

    refused --> WAIT --> ... --> RELEASE tells the oldest ticket's process, and keeps the key for it
                                 '--> that one acquires the lock, with the token of its ticket
                         ... of one of several places: it is free, and that one tries all of them
    given up, or come by itself --> LEAVE, which hands on what is kept for it

A wake-up may be lost, and costs time only: everybody who waits comes by itself some day.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery_redlock.lock.records import (
    SEVERAL,
    channel,
    encode_info,
    holder_payload,
    place_name,
    ready_key,
    record_key,
)
from celery_redlock.lock.requests import HAND_OVER, Request
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripting import CONSTANTS, HEAD, Script, read_release, register
from celery_redlock.lock.scripts import WAKE

__all__ = [
    "HEARD_FOR",
    "LEAVE",
    "MOST_PLACES",
    "WAIT",
    "Ticket",
    "leave_request",
    "locks_of",
    "place_of",
    "wait_request",
    "waiting_key",
]

#: How long a node counts somebody as waiting that it has not heard of again [s]. A message that is
#: purged from its queue takes nobody's place for longer.
HEARD_FOR = 300.0
#: Most places of one lock: each is a key on every node, and all are looked at at once.
MOST_PLACES = 1000

# Nobody has waited since a moment that is yet to come: one whose clock is ahead would be passed by
# all others for as long as that.

# KEYS 1 who waits 2 tickets 3... the lock
# ARGV 1 who 2 ticket, or '' for one that cannot be woken yet 3 since when 4 how many may wait, or
#      '0' for any number 5 for how long one counts who is not heard of 6 what channels begin with
# As many are woken at once as places are free: they were released before this came. Their tickets
# go, as with a release: one whose process listens and does nothing would be woken in place of all
# others. One that lives is noted again within seconds.
WAIT_LUA = """
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', whole(now - tonumber(ARGV[5])))
local is_known = redis.call('ZSCORE', KEYS[1], ARGV[1])
if ARGV[4] ~= '0' and not is_known and redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[4]) then
  return {0, 0}
end
redis.call('ZADD', KEYS[1], whole(now), ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
if ARGV[2] ~= '' then
  local since = redis.call('ZSCORE', KEYS[2], ARGV[2]) or whole(math.min(now, tonumber(ARGV[3])))
  redis.call('ZADD', KEYS[2], since, ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[5])
  for i = 3, #KEYS do
    if redis.call('EXISTS', KEYS[i]) == 0 then
      local woken = wake(KEYS[2], KEYS[i], ARGV[6], '-')
      if not woken then break end
      redis.call('ZREM', KEYS[2], woken)
    end
  end
end
return {1, 0}
"""

# KEYS 1 who waits 2 tickets 3... the lock: places that the next one is to have if they are kept for
#      this one, or, of several, if they are free and this one was woken
# ARGV 1 who 2 ticket, or '' for none 3 what channels begin with 4 for how long a key stands for
#      who was woken
LEAVE_LUA = """
local gone = redis.call('ZREM', KEYS[1], ARGV[1])
local is_one_of = string.sub(ARGV[2], TOKEN + CHANNEL + 1, TOKEN + CHANNEL + 1) == SEVERAL
local was_woken = is_one_of and not redis.call('ZSCORE', KEYS[2], ARGV[2])
if ARGV[2] ~= '' then redis.call('ZREM', KEYS[2], ARGV[2]) end
local token = string.sub(ARGV[2], 1, TOKEN)
for i = 3, #KEYS do
  local cur = redis.call('GET', KEYS[i])
  local is_kept = cur and #token == TOKEN and string.sub(cur, 1, TOKEN) == token
  if is_kept or (was_woken and not cur) then
    hand_over(KEYS[2], KEYS[i], ARGV[3], string.sub(token, 1, OWNER), ARGV[4])
    was_woken = false
  end
end
return {gone, 0}
"""

WAIT = Script(HEAD + WAKE + WAIT_LUA, read_release, guarded=False, one_way=True)
LEAVE = Script(CONSTANTS + WAKE + LEAVE_LUA, read_release, guarded=False, one_way=True)
register(WAIT, LEAVE)


@dataclass(frozen=True)
class Ticket:
    """
    Somebody who waits for a lock.

    Attributes:
        name: Lock name.
        limit: How many places the lock has.
        who: What tells this one from others who wait: 32 hexadecimal digits.
        since: Since when [s, Unix time].
        info: Description; plain JSON values.
        token: That it is woken by, and acquires the lock with then; empty where it cannot be woken.
        channel: Of its process; likewise.
    """

    name: str
    who: str = field(repr=False)
    since: float
    info: dict[str, Any]
    token: str = field(default="", repr=False)
    channel: str = ""
    limit: int = 1

    @property
    def waits(self) -> bytes:
        """What the nodes know it by; the same however often it waits again, or is delivered."""
        return self.who.encode() + encode_info(self.info)

    @property
    def wakes(self) -> bytes:
        """What wakes it; empty if nothing does."""
        if not self.token:
            return b""
        mark = SEVERAL if self.limit > 1 else ""
        description = encode_info(holder_payload(self.info, self.since))
        return (self.token + self.channel + mark).encode() + description


def waiting_key(rules: Rules, name: str) -> bytes:
    """Return the Redis key of who waits for the lock *name*."""
    return record_key(rules.prefix, "waiting", name)


def locks_of(rules: Rules, ticket: Ticket) -> tuple[bytes, ...]:
    """Return the keys of all places of the lock that *ticket* waits for, in their order."""
    names = (place_name(ticket.name, place) for place in range(ticket.limit))
    return tuple(record_key(rules.prefix, "lock", name) for name in names)


def place_of(rules: Rules, ticket: Ticket, lock: bytes) -> int:
    """
    Return which place of the lock that *ticket* waits for has the key *lock*.

    It may be one that the ticket does not know: a limit changes, and two tasks with one name may
    have different ones.
    """
    names = (place_name(ticket.name, place) for place in range(MOST_PLACES))
    keys = (record_key(rules.prefix, "lock", name) for name in names)
    return next((place for place, key in enumerate(keys) if key == lock), 0)


def keys_of(rules: Rules, name: str) -> tuple[bytes, bytes]:
    return waiting_key(rules, name), ready_key(rules.prefix, name)


def wait_request(rules: Rules, ticket: Ticket, most: int = 0) -> Request:
    """Return what notes that *ticket* waits, unless *most* others do already; 0 for any number."""
    return Request(
        WAIT,
        (*keys_of(rules, ticket.name), *locks_of(rules, ticket)),
        (
            ticket.waits,
            ticket.wakes,
            b"%d" % round(ticket.since * 1000),
            b"%d" % most,
            b"%d" % round(HEARD_FOR * 1000),
            channel(rules.prefix),
        ),
    )


def leave_request(rules: Rules, ticket: Ticket, *, keeps: int | None = None) -> Request:
    """
    Return what notes that *ticket* waits no more, and hands on what it was woken for.

    Args:
        rules: Of the cluster.
        ticket: Who waits no more.
        keeps: The place that it has, or is about to acquire: nothing is handed on; None for none.
    """
    is_handed_on = bool(ticket.token) and keeps is None
    places = locks_of(rules, ticket) if is_handed_on else ()
    return Request(
        LEAVE,
        (*keys_of(rules, ticket.name), *places),
        (ticket.waits, ticket.wakes, channel(rules.prefix), HAND_OVER),
    )
