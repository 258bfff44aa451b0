"""
Waiters as the nodes record them: added when refused, sent a hint when the lock is released.

A node grants nothing by it. It has two keys for each lock name, which expire:

    redlock:line:NAME      sorted set: who waits, channel and limit -> since when [ms]
    redlock:waiters:NAME   hash: who waits -> channel, limit, since when the node knows of it and
                           when it last heard of it [ms], description

    refused --> WAIT --> ... --> RELEASE takes the oldest out of the line, and sends its process a
                                 hint --> that one tries like everybody --> in vain: WAIT again
    granted, or given up --> LEAVE

A hint may be lost, and costs time only: everybody who waits comes by itself some day.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import (
    CHANNEL_LENGTH,
    Keys,
    encode_info,
    holder_payload,
    line_key,
    lock_keys,
    waiters_key,
)
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import Request
from celery_redlock.lock.scripts.scripting import (
    AMOUNT,
    CONSTANTS,
    GUARD,
    LAPSE,
    LAPSES,
    TTL,
    Script,
    read_release,
    register,
    replies,
)
from celery_redlock.lock.scripts.votes import Ballot, VoteKind, has_majority, votes_of

__all__ = [
    "HEARD_FOR",
    "LEAVE",
    "MOST_PLACES",
    "WAIT",
    "InLine",
    "free_places",
    "has_answered",
    "leave_request",
    "wait_request",
    "waits_since",
]

#: How long a node counts somebody as waiting that it has not heard of again [s]. A message that is
#: purged from its queue takes nobody's place for longer.
HEARD_FOR = 300.0
#: Most places of one lock: each is a key on every node, and one request looks at them all.
MOST_PLACES = 1000
#: Length of a limit, and of a moment [ms], as they are kept.
LIMIT_LENGTH, MOMENT_LENGTH = 4, 13
#: In place of a channel: nothing is sent to whoever has this one, and it is in no line.
NO_CHANNEL = "-" * CHANNEL_LENGTH

# Nobody has waited since a moment that is yet to come, or for longer than the node has known of
# it: one whose clock is ahead would be passed by all others, and one that lies would pass them.
# A node in quarantine has nobody wait, and so sends no hints: it may have forgotten who holds the
# lock. A node forgets whom it has not heard of when another would be too many, and now and then.

# KEYS 1 line 2 waiters 3 boot 4 quarantine 5... the places of the lock, to have told how many of
#      them nobody holds; answered with how long this one has waited by what the node knows, and
#      when the first place lapses
# ARGV 1 who 2 channel 3 limit 4 since when 5 how many may wait, or '0' for any number 6 for how
#      long one counts who is not heard of 7 description 8 '1' to have told when a place lapses,
#      which takes a look at each 9 quarantine or '0' 10 boot id
WAIT_LUA = f"""
local LIMIT, MOMENT, NONE = {LIMIT_LENGTH}, {MOMENT_LENGTH}, '{NO_CHANNEL}'
local KNOWN = {CHANNEL_LENGTH} + LIMIT
local function forget_silent(line, waiters, before)
  local all = redis.call('HGETALL', waiters)
  for i = 1, #all, 2 do
    local heard = tonumber(string.sub(all[i + 1], KNOWN + MOMENT + 1, KNOWN + 2 * MOMENT))
    if not heard or heard < before then
      redis.call('HDEL', waiters, all[i])
      redis.call('ZREM', line, all[i] .. string.sub(all[i + 1], 1, KNOWN))
    end
  end
end
local now = now_ms()
local found, held_back = unpack(redis.call('MGET', KEYS[3], KEYS[4]))
local code, left = may_vote(found, held_back, KEYS[3], KEYS[4], ARGV[10], ARGV[9])
if code == -2 then redis.call('DEL', KEYS[1], KEYS[2]) end
if code ~= 1 then return {{code, now, left}} end
local known = redis.call('HGET', KEYS[2], ARGV[1])
if not known then
  local many, most = redis.call('HLEN', KEYS[2]), tonumber(ARGV[5])
  if many % 64 == 63 or (most > 0 and many >= most) then
    forget_silent(KEYS[1], KEYS[2], now - tonumber(ARGV[6]))
    many = redis.call('HLEN', KEYS[2])
  end
  if most > 0 and many >= most then return {{4, now}} end
end
local first = known and tonumber(string.sub(known, KNOWN + 1, KNOWN + MOMENT)) or now
local reached = ARGV[2] .. ARGV[3]
if known and string.sub(known, 1, KNOWN) ~= reached then
  redis.call('ZREM', KEYS[1], ARGV[1] .. string.sub(known, 1, KNOWN))
end
redis.call('HSET', KEYS[2], ARGV[1],
  reached .. string.format('%013.0f%013.0f', first, now) .. ARGV[7])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
local since = math.min(now, math.max(first, tonumber(ARGV[4])))
if ARGV[2] ~= NONE then
  redis.call('ZADD', KEYS[1], whole(since), ARGV[1] .. reached)
  redis.call('PEXPIRE', KEYS[1], ARGV[6])
end
local free = #KEYS - 4
if free > 0 then free = free - redis.call('EXISTS', unpack(KEYS, 5)) end
return {{1, now, free, now - since, ARGV[8] == '1' and lapse(KEYS, 5) or 0}}
"""

# KEYS 1 line 2 waiters ; ARGV 1 who
LEAVE_LUA = f"""
local known = redis.call('HGET', KEYS[2], ARGV[1])
if known then
  redis.call('ZREM', KEYS[1], ARGV[1] .. string.sub(known, 1, {CHANNEL_LENGTH + LIMIT_LENGTH}))
end
return {{redis.call('HDEL', KEYS[2], ARGV[1]), 0}}
"""

WAIT = Script(
    GUARD + LAPSE + WAIT_LUA,
    replies({1: (VoteKind.GRANTED, (AMOUNT, TTL, LAPSES)), 4: (VoteKind.REFUSED, ())}),
    guarded=True,
    one_way=True,
)
LEAVE = Script(CONSTANTS + LEAVE_LUA, read_release, guarded=False, one_way=True)
register(WAIT, LEAVE)


@dataclass(frozen=True)
class InLine:
    """Somebody who waits for a lock, as a node knows it."""

    name: str
    who: str = field(repr=False)  # tells this one from others: 32 hexadecimal digits
    since: float  # [s, Unix time]
    info: dict[str, Any]  # plain JSON values
    channel: str = ""  # of its process; empty where nothing can be sent to it
    limit: int = 1  # how many places the lock has for it
    asks: bool = False  # whether the nodes are to say how many of these nobody holds
    lapses: bool = False  # and when the first lapses: of starts, which nobody releases


def wait_request(rules: Rules, one: InLine, most: int = 0) -> Request:
    """Record that *one* waits, unless *most* others do already; 0 for any number."""
    places = lock_keys(rules.prefix, one.name, one.limit) if one.asks else ()
    node = Keys.of(rules.prefix, "")
    return Request(
        WAIT,
        (
            line_key(rules.prefix, one.name),
            waiters_key(rules.prefix, one.name),
            node.boot,
            node.quarantine,
            *places,
        ),
        (
            one.who.encode(),
            (one.channel or NO_CHANNEL).encode(),
            b"%0*d" % (LIMIT_LENGTH, one.limit),
            b"%d" % round(one.since * 1000),
            b"%d" % most,
            b"%d" % round(HEARD_FOR * 1000),
            encode_info(holder_payload(one.info, one.since)),
            b"1" if one.lapses else b"0",
            rules.quarantine_ms,
        ),
    )


def leave_request(rules: Rules, name: str, who: str) -> Request:
    return Request(
        LEAVE, (line_key(rules.prefix, name), waiters_key(rules.prefix, name)), (who.encode(),)
    )


def has_answered(ballot: Ballot) -> bool:
    return any(has_majority(ballot, kind) for kind in (VoteKind.GRANTED, VoteKind.REFUSED))


def waits_since(ballot: Ballot) -> float | None:
    """Return since when somebody waits by what a majority says [s, the nodes' time], or None."""
    said = sorted(vote.node_now - vote.ttl for vote in votes_of(ballot, VoteKind.GRANTED))
    majority = quorum(len(ballot))
    return said[majority - 1] if len(said) >= majority else None


def free_places(ballot: Ballot) -> int:
    """Return how many places of the lock nobody holds, at least, by what a majority says."""
    said = sorted(vote.amount for vote in votes_of(ballot, VoteKind.GRANTED))
    majority = quorum(len(ballot))
    return said[-majority] if len(said) >= majority else 0
