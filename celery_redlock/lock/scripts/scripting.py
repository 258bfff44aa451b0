"""
Parts that all scripts share: the head of their Lua, their registration, the reading of replies.

Times are milliseconds in Lua, and seconds in a `Vote`. Numbers travel as decimal strings made
with ``%.0f``: Lua's own conversion keeps 14 digits of a fence's 16. Every write carries an expiry.

A reply is ``{code, node's clock, fields ...}``; what a code means, and which fields follow, a
script says when it is made (`replies`). Some codes mean the same in all of them.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery_redlock.lock.records import OWNER_LENGTH, TOKEN_LENGTH
from celery_redlock.lock.scripts.votes import Vote, VoteKind

__all__ = [
    "AMOUNT",
    "FENCE",
    "GUARD",
    "HEAD",
    "LAPSE",
    "LAPSES",
    "LARGEST",
    "TTL",
    "VALUE",
    "Script",
    "fence_in",
    "left",
    "only_reads",
    "pack",
    "read_release",
    "register",
    "registered",
    "replies",
    "seconds",
    "text",
    "whole",
]

# --- Lua -----------------------------------------------------------------------------------

#: How long a node remembers that it is enrolled after the last grant, renewal or probe [ms]: 30
#: days. Workers probe all the time, so one that takes no locks for months is not forgotten.
BOOT_RETENTION = 30 * 24 * 3600 * 1000

#: With how much of that left it is told again [ms]: 29 days. Few of the requests write it then.
BOOT_REFRESHED = 29 * 24 * 3600 * 1000

CONSTANTS = (
    f"local TOKEN, OWNER, REMEMBERED = {TOKEN_LENGTH}, {OWNER_LENGTH}, '{BOOT_RETENTION}'\n"
    f"local REFRESHED = {BOOT_REFRESHED}"
)

# Common head of the scripts that know the time. `keep` lets a key live for so long at least.
HEAD = (
    CONSTANTS
    + """
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function whole(n) return string.format('%.0f', n) end
local function keep(key, life)
  if redis.call('PTTL', key) < tonumber(life) then redis.call('PEXPIRE', key, life) end
end
"""
)

# When the first lapses of those keys, from a number on, that are there [ms]; 0 if none does.
LAPSE = """
local function lapse(keys, first)
  local least = 0
  for i = first, #keys do
    local left = redis.call('PTTL', keys[i])
    if left >= 0 and (least == 0 or left < least) then least = math.max(left, 1) end
  end
  return least
end
"""

# Common head of the scripts that vote: a node whose boot marker is not the run id that this
# connection saw has lost its memory (restart, flush, failover) and must not vote for a while (-2).
# A boot id is 'run id:fingerprint', the run id 40 characters; with another fingerprint the node
# belongs to clients of another configuration, and votes for nobody here (-6). Whoever is granted
# something has the node remember that it is enrolled.
#
# The marker of a node that has evicted keys ends in '+' and how many: with one more, it may have
# evicted a lock, and has lost its memory. A node that may evict is asked with '+' after the boot
# id, so that every vote looks. No key is evicted amid a script.
GUARD = (
    HEAD
    + """
local function evicted()
  local count = string.match(redis.call('INFO', 'stats'), 'evicted_keys:(%d+)')
  return count and count ~= '0' and '+' .. count or ''
end
local function without_count(id) return string.match(id, '^[^+]*') end
local function may_vote(found, held_back, boot, quarantine, boot_id, quarantine_ms)
  if quarantine_ms == '0' then return 1 end
  if found ~= boot_id then
    local id, known = without_count(boot_id), found and without_count(found)
    if found and known ~= id and string.sub(found, 1, 41) == string.sub(boot_id, 1, 41) then
      return -6, 0
    end
    local marker = known == id and found or id
    if id ~= boot_id then marker = id .. evicted() end
    if found ~= marker then
      redis.call('SET', boot, marker, 'PX', REMEMBERED)
      redis.call('SET', quarantine, '1', 'PX', quarantine_ms)
      held_back = true
    end
  end
  if held_back then return -2, redis.call('PTTL', quarantine) end
  return 1
end
local function remember(key, quarantine_ms)
  if quarantine_ms ~= '0' and redis.call('PTTL', key) < REFRESHED then
    redis.call('PEXPIRE', key, REMEMBERED)
  end
end
"""
)


# --- scripts -------------------------------------------------------------------------------


class Script:
    """One Lua script and how to read its reply."""

    def __init__(
        self,
        source: str,
        read: Callable[[Any], Vote],
        *,
        guarded: bool,
        one_way: bool = False,
        writes: bool = True,
        positive: Sequence[enum.Enum] = (VoteKind.GRANTED,),
    ) -> None:
        self.source = source.encode()
        self.sha = hashlib.sha1(self.source).hexdigest().encode()  # noqa: S324  Redis names scripts so
        self.read = read
        #: Whether the last argument is the node's boot id, which differs per node. Only such a
        #: script grants anything; the others do no harm when they come late.
        self.guarded = guarded
        #: Whether every node should get it though nobody waits for the answer, if need be later.
        self.one_way = one_way
        #: Votes that count for whoever asks, and no more once the connection is lost.
        self.positive = frozenset(positive)
        if not writes:
            _readers.add(self.sha)


#: Digests of the scripts that write nothing.
_readers: set[bytes] = set()
_registered: list[Script] = []


def register(*scripts: Script) -> None:
    """Have every node know *scripts* from the moment it is connected."""
    _registered.extend(scripts)


def registered() -> tuple[Script, ...]:
    return tuple(_registered)


def only_reads(digest: bytes) -> bool:
    """Return whether a script writes nothing, as it says when it is made."""
    return digest in _readers


def pack(*words: bytes, more: int = 0) -> bytes:
    """Return a command as Redis reads it (RESP); *more* of its words are to follow."""
    sized = zip(map(len, words), words, strict=True)
    packed = b"".join([b"$%d\r\n%b\r\n" % word for word in sized])
    return b"*%d\r\n%b" % (len(words) + more, packed)


# --- replies -------------------------------------------------------------------------------

#: Beyond it Lua does not hold a whole number exactly, so no script of ours answers a larger one.
LARGEST = 2**53
DIGITS = re.compile(rb"[0-9]{1,%d}" % len(str(LARGEST)))


def whole(value: Any) -> int:
    """Return *value* if it is a number that our scripts can answer; raise ValueError if not."""
    if type(value) is int and -LARGEST <= value <= LARGEST:
        return value
    raise ValueError("no such word of ours")  # without it: it may have a token


def natural(value: Any) -> int:
    return max(0, whole(value))


def seconds(value: Any) -> float:
    return whole(value) / 1000.0


def left(value: Any) -> float:
    return natural(value) / 1000.0


def text(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    raise ValueError("no such word of ours")  # without it: it may have a token


def fence_in(value: Any) -> int:
    if type(value) is bytes and DIGITS.fullmatch(value):
        fence = int(value)
        if fence <= LARGEST:
            return fence
    raise ValueError("no such word of ours")  # without it: it may have a token


#: A field of a reply: what of a `Vote` it is, and how it is read.
Field = tuple[str, Callable[[Any], Any]]
FENCE: Field = ("fence", fence_in)
TTL: Field = ("ttl", left)
VALUE: Field = ("value", text)
AMOUNT: Field = ("amount", natural)
LAPSES: Field = ("lapses", left)

#: Codes that mean the same in the replies of all scripts: the vote, and the fields that follow.
ANSWERS: dict[int, tuple[enum.Enum, tuple[Field, ...]]] = {
    0: (VoteKind.REFUSED, (TTL, VALUE, FENCE)),
    -2: (VoteKind.QUARANTINED, (TTL,)),
    -3: (VoteKind.MARKED, (VALUE,)),
}
#: Why a node answered with one of these codes instead of a vote.
NO_VOTE = {
    -5: "our clock is too far ahead of the node's",
    -6: "enrolled for another list of nodes or redlock_max_ttl",
    -7: "the fence is too far ahead of the node's clock: set by hand, or the clock was set back",
}


def replies(own: Mapping[int, tuple[enum.Enum, tuple[Field, ...]]]) -> Callable[[Any], Vote]:
    """Return a function that reads replies with the common codes and these of its *own*."""
    answers = ANSWERS | dict(own)

    def read(reply: Any) -> Vote:
        code, now = reply[0], reply[1]
        if type(code) is not int or type(now) is not int or not -LARGEST <= now <= LARGEST:
            raise ValueError("no such reply of ours")
        if code in NO_VOTE:
            return Vote(VoteKind.UNREACHABLE, node_now=now / 1000.0, reason=NO_VOTE[code])
        kind, fields = answers[code]
        found: dict[str, Any] = {"node_now": now / 1000.0}
        place = 2
        for name, parse in fields:
            found[name] = parse(reply[place])
            place += 1
        return Vote(kind, **found)

    return read


def read_release(reply: Any) -> Vote:
    """Return the vote of a script that grants no lock: granted if it found what is ours."""
    done, nothing = map(whole, reply)
    if done not in (0, 1) or nothing != 0:
        raise ValueError("no such reply of ours")
    return Vote(VoteKind.GRANTED if done else VoteKind.REFUSED)
