"""
What runs inside a node: short Lua scripts, their keys, and their replies as votes.

Times are milliseconds in this file and nowhere else. Numbers travel as decimal
strings made with ``%.0f``: Lua's own conversion keeps 14 digits of a fence's 16.
Every write carries an expiry.

A lock's value is ``token`` (40 characters) followed by what the holder tells of
itself, as JSON. Only the token is compared; in RELEASE the owner's part of it suffices.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from celery_redlock.lock.votes import OWNER_LENGTH, TOKEN_LENGTH, Vote, VoteKind

__all__ = [
    "ACQUIRE",
    "ENROL",
    "INSPECT",
    "MARK",
    "PROBE",
    "RELEASE",
    "RENEW",
    "Keys",
    "Script",
    "marker_key",
    "ms",
    "pack",
    "probe_key",
    "record_key",
    "register",
    "registered",
]

#: How long a node remembers that it is enrolled after the last grant, renewal or probe [ms]: 30
#: days. Workers probe all the time, so one that takes no locks for months is not forgotten.
BOOT_RETENTION = 30 * 24 * 3600 * 1000
LONGEST_NAME = 110
#: Beyond it Lua does not hold a whole number exactly, so no script of ours answers a larger one.
LARGEST = 2**53
#: Why a node answered with one of these codes instead of a vote.
NO_VOTE = {
    -5: "our clock is too far ahead of the node's",
    -6: "enrolled for another list of nodes or redlock_max_ttl",
    -7: "the fence is too far ahead of the node's clock: set by hand, or the clock was set back",
}

CONSTANTS = f"local TOKEN, OWNER, REMEMBERED = {TOKEN_LENGTH}, {OWNER_LENGTH}, '{BOOT_RETENTION}'"

# Common head of the scripts that vote: a node whose boot marker is not the run id that this
# connection saw has lost its memory (restart, flush, failover) and must not vote for a while (-2).
# A boot id is 'run id:fingerprint', the run id 40 characters; with another fingerprint the node
# belongs to clients of another configuration, and votes for nobody here (-6).
GUARD = (
    CONSTANTS
    + """
local function standing(found, held_back, boot, quarantine, boot_id, quarantine_ms)
  if quarantine_ms == '0' then return 1 end
  if found ~= boot_id then
    if found and string.sub(found, 1, 41) == string.sub(boot_id, 1, 41) then return -6, 0 end
    redis.call('SET', boot, boot_id, 'PX', REMEMBERED)
    redis.call('SET', quarantine, '1', 'PX', quarantine_ms)
    held_back = true
  end
  if held_back then return -2, redis.call('PTTL', quarantine) end
  return 1
end
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
"""
)

# Whether the node was a replica since it was asked last: it then has what its master had, perhaps
# an older copy of its own data, marker and run id included. Its replication id is another one after
# that. So it is after a first replica came, or the last one went; there is no second id then.
HISTORY = """
local function was_replica(boot)
  local told = redis.call('INFO', 'replication')
  local id, second = string.match(told, 'master_replid:(%x+)'), string.match(told, 'replid2:(%x+)')
  local known = redis.call('GET', boot .. ':history')
  if not id or known == id then return false end
  redis.call('SET', boot .. ':history', id, 'PX', REMEMBERED)
  return known and second and string.find(second, '[^0]')
end
"""

# In ACQUIRE and RENEW: no clock that may be right has made a fence that is further ahead of the
# node's clock than clocks may differ, so it counts for nothing (-7), and is never written. Compared
# so that "nan", which is a number to Lua, does not pass.

# KEYS 1 lock 2 fence 3 marker, or the lock again for none 4 boot 5 quarantine
# ARGV 1 token 2 info 3 ttl 4 proposed fence or '0' 5 fence retention 6 skew allowed
#      7 quarantine or '0' 8 boot id
ACQUIRE_LUA = """
local now = now_ms()
local cur, seen, marker, found, held_back = unpack(redis.call('MGET', unpack(KEYS)))
local code, left = standing(found, held_back, KEYS[4], KEYS[5], ARGV[8], ARGV[7])
if code ~= 1 then return {code, now, left} end
if marker and KEYS[3] ~= KEYS[1] then return {-3, now, marker} end
if cur and string.sub(cur, 1, TOKEN) ~= ARGV[1] then
  return {0, now, redis.call('PTTL', KEYS[1]), cur, seen or '0'}
end
local fence = '0'
if ARGV[4] ~= '0' then
  local proposed, largest = tonumber(ARGV[4]), (now + tonumber(ARGV[6])) * 4096
  if proposed > largest then return {-5, now} end
  local f = tonumber(seen or '0') + 1
  if not (f <= largest) then return {-7, now} end
  if proposed > f then f = proposed end
  fence = string.format('%.0f', f)
  redis.call('SET', KEYS[2], fence, 'PX', ARGV[5])
end
redis.call('SET', KEYS[1], ARGV[1] .. ARGV[2], 'PX', ARGV[3])
if ARGV[7] ~= '0' then redis.call('PEXPIRE', KEYS[4], REMEMBERED) end
return {1, now, fence}
"""

# KEYS 1 lock 2 fence 3 boot 4 quarantine
# ARGV 1 token 2 info 3 ttl 4 fence or '0' 5 fence retention 6 skew allowed 7 repair ('1' or '0')
#      8 quarantine or '0' 9 boot id
RENEW_LUA = """
local now = now_ms()
local cur, seen, found, held_back = unpack(redis.call('MGET', unpack(KEYS)))
local code, left = standing(found, held_back, KEYS[3], KEYS[4], ARGV[9], ARGV[8])
if ARGV[4] ~= '0' then
  local f, m = tonumber(seen or '0'), tonumber(ARGV[4])
  local is_bounded = math.max(f, m) <= (now + tonumber(ARGV[6])) * 4096
  if f ~= m and not is_bounded then return {-7, now} end
end
local kind = 1
local passed = ARGV[4] ~= '0' and tonumber(seen or '0') > tonumber(ARGV[4])
if not cur and ARGV[7] == '1' and not passed then kind = 2
elseif not cur or string.sub(cur, 1, TOKEN) ~= ARGV[1] then
  local ttl = redis.call('PTTL', KEYS[1])
  return {0, now, ttl, cur or '', seen or '0'}
end
redis.call('SET', KEYS[1], ARGV[1] .. ARGV[2], 'PX', ARGV[3])
local fence = '0'
if ARGV[4] ~= '0' then
  local f = tonumber(seen or '0')
  local m = tonumber(ARGV[4])
  if m > f then f = m end
  fence = string.format('%.0f', f)
  redis.call('SET', KEYS[2], fence, 'PX', ARGV[5])
end
if code ~= 1 then return {code, now, left} end
if ARGV[8] ~= '0' then redis.call('PEXPIRE', KEYS[3], REMEMBERED) end
return {kind, now, fence}
"""

# KEYS 1 lock 2 marker, or the lock again for none: a user may be allowed our keys only. What is
#      done stays done: a child that was killed while it finished may speak last
# ARGV 1 token, or its owner's part of it 2 keep the key for so long yet, or '0' 3 marker value
#      4 marker ttl
RELEASE_LUA = """
local cur = redis.call('GET', KEYS[1])
local mine = cur and #ARGV[1] >= OWNER and string.sub(cur, 1, #ARGV[1]) == ARGV[1]
if mine then
  if ARGV[2] == '0' then redis.call('DEL', KEYS[1]) else redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
end
if KEYS[2] ~= KEYS[1] and (ARGV[3] == 'done' or redis.call('GET', KEYS[2]) ~= 'done') then
  redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
end
return {mine and 1 or 0, 0}
"""

# KEYS 1 boot 2 quarantine
# ARGV 1 boot id 2 quarantine 3 'look', 'trust', 'quarantine' or 'bootstrap'
# A marker is 'run id:fingerprint'. Answers the state found, the clock, what is left of a
# quarantine, and the marker found.
ENROL_LUA = """
local now = now_ms()
local found = redis.call('GET', KEYS[1])
if ARGV[3] == 'bootstrap' then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', REMEMBERED)
  was_replica(KEYS[1])
  redis.call('DEL', KEYS[2])
  return {'enrolled', now, 0, ARGV[1]}
end
if not found and ARGV[3] == 'look' then return {'unmarked', now, 0, ''} end
if not found and ARGV[3] == 'trust' then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', REMEMBERED)
elseif found and string.sub(found, 41) ~= string.sub(ARGV[1], 41) then
  return {'foreign', now, 0, found}
end
if was_replica(KEYS[1]) then redis.call('SET', KEYS[2], '1', 'PX', ARGV[2]) end
local held_back = redis.call('EXISTS', KEYS[2]) == 1
found = redis.call('GET', KEYS[1])
local code, left = standing(found, held_back, KEYS[1], KEYS[2], ARGV[1], ARGV[2])
return {'enrolled', now, left or 0, found or ''}
"""


# KEYS 1 marker ; ARGV 1 value 2 ttl, or '0' to take a marker of this value away
MARK_LUA = """
if ARGV[2] == '0' then
  if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
else redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return {1, 0}
"""

# KEYS 1 lock 2 fence
INSPECT_LUA = """
local cur = redis.call('GET', KEYS[1])
local fence = redis.call('GET', KEYS[2]) or '0'
if not cur then return {2, now_ms(), fence} end
return {0, now_ms(), redis.call('PTTL', KEYS[1]), cur, fence}
"""


# KEYS 1 boot 2 quarantine 3 is written: a node that takes no writes does not vote
# ARGV 1 quarantine or '0' 2 boot id
PROBE_LUA = """
local now = now_ms()
redis.call('SET', KEYS[3], '1', 'PX', '1000')
if ARGV[1] ~= '0' and was_replica(KEYS[1]) then redis.call('SET', KEYS[2], '1', 'PX', ARGV[1]) end
local found, held_back = unpack(redis.call('MGET', KEYS[1], KEYS[2]))
local code, left = standing(found, held_back, KEYS[1], KEYS[2], ARGV[2], ARGV[1])
if code ~= 1 then return {code, now, left} end
if ARGV[1] ~= '0' then
  redis.call('PEXPIRE', KEYS[1], REMEMBERED)
  redis.call('PEXPIRE', KEYS[1] .. ':history', REMEMBERED)
end
return {1, now, '0'}
"""


class Keys(NamedTuple):
    """
    The Redis keys of one lock name.

    Attributes:
        lock: Holds the token and what the holder tells of itself.
        fence: Holds the largest fencing number given out.
        boot: Holds what the node was when it was enrolled; one per node.
        quarantine: Is there while the node must not vote; one per node.
    """

    lock: bytes
    fence: bytes
    boot: bytes
    quarantine: bytes

    @staticmethod
    def of(prefix: str, name: str) -> Keys:
        """Return the keys of *name*; each is shorter than 200 bytes."""
        return keys_of(prefix, shorten(name))


@lru_cache(maxsize=1024)
def keys_of(prefix: str, short: str) -> Keys:
    """Return the keys of a name that is shortened already: the cache keeps no long one."""
    return Keys(
        *(f"{prefix}:{part}".encode() for part in (f"lock:{short}", f"fence:{short}")),
        *(f"{prefix}:node:{part}".encode() for part in ("boot", "quarantine")),
    )


def record_key(prefix: str, kind: str, name: str) -> bytes:
    """Return the Redis key of the record of *kind* about *name*; shorter than 200 bytes."""
    return f"{prefix}:{kind}:{shorten(name)}".encode()


def marker_key(prefix: str, marker: str) -> bytes:
    """Return the Redis key of a marker."""
    return record_key(prefix, "marker", marker)


def probe_key(prefix: str) -> bytes:
    """Return the Redis key that is written to see whether a node takes writes."""
    return f"{prefix}:node:probe".encode()


def shorten(name: str) -> str:
    """Return *name*, or if it is too long for a key its beginning and a digest of all of it."""
    encoded = name.encode()
    if len(encoded) <= LONGEST_NAME:
        return name
    begin = encoded[: LONGEST_NAME - 33].decode(errors="ignore")
    return f"{begin}~{hashlib.sha256(encoded).hexdigest()[:32]}"


def pack(*arguments: bytes) -> bytes:
    """Return a command as Redis reads it (RESP); packed once and sent to every node."""
    parts = [b"*%d\r\n" % len(arguments)]
    parts += [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"".join(parts)


def ms(seconds: float) -> bytes:
    """Return *seconds* in whole milliseconds, at least one: PX 0 is an error."""
    return b"%d" % max(1, round(seconds * 1000))


def whole(told: Any) -> int:
    """Return *told* if it is a number that a script of ours can answer; raise ValueError if not."""
    if type(told) is int and -LARGEST <= told <= LARGEST:
        return told
    raise ValueError(told)


def seconds(told: Any) -> float:
    """Return a moment or a time in a reply [s]; likewise."""
    return whole(told) / 1000.0


def left(told: Any) -> float:
    """Return what is left of something in a reply [s, >= 0]; likewise."""
    return max(0, whole(told)) / 1000.0


def text(told: Any) -> bytes:
    """Return *told* if it is text; raise ValueError if not."""
    if type(told) is bytes:
        return told
    raise ValueError(told)


def fence_in(told: Any) -> int:
    """Return the number that *told* is in digits; raise ValueError if a script writes none so."""
    digits = text(told)
    if digits.isdigit() and len(digits) <= len(str(LARGEST)) and int(digits) <= LARGEST:
        return int(digits)
    raise ValueError(told)


def read_vote(reply: Any) -> Vote:
    """Return the vote in the reply of `ACQUIRE` or `RENEW`."""
    code, now = whole(reply[0]), seconds(reply[1])
    if code == 1:
        return Vote(VoteKind.GRANTED, fence_in(reply[2]), node_now=now)
    if code == 0:
        return Vote(VoteKind.REFUSED, fence_in(reply[4]), left(reply[2]), text(reply[3]), now)
    if code == 2:  # noqa: PLR2004  the codes are those of the scripts above
        return Vote(VoteKind.REPAIRED, fence_in(reply[2]), node_now=now)
    if code == -2:  # noqa: PLR2004
        return Vote(VoteKind.QUARANTINED, ttl=left(reply[2]), node_now=now)
    if code == -3:  # noqa: PLR2004
        return Vote(VoteKind.MARKED, value=text(reply[2]), node_now=now)
    return Vote(VoteKind.UNREACHABLE, node_now=now, reason=NO_VOTE[code])


def read_release(reply: Any) -> Vote:
    """Return the vote in the reply of `RELEASE`: granted if the lock was ours."""
    done, nothing = map(whole, reply)
    if done not in (0, 1) or nothing != 0:
        raise ValueError(reply)
    return Vote(VoteKind.GRANTED if done else VoteKind.REFUSED)


class Script:
    """
    One Lua script and how to read its reply.

    Attributes:
        source: The Lua text.
        sha: Its SHA-1 digest, by which a node knows it.
        read: Turns the reply into a `Vote`.
        guarded: Whether the last argument is the node's boot id, which differs per node. Only such
            a script grants anything; the others do no harm when they come late.
        one_way: Whether every node should get it though nobody waits for the answer, if need be
            later.
        positive: Votes that count for whoever asks, and no more once the connection is lost.
    """

    def __init__(
        self,
        source: str,
        read: Callable[[Any], Vote],
        *,
        guarded: bool,
        one_way: bool = False,
        positive: Sequence[enum.Enum] = (VoteKind.GRANTED,),
    ) -> None:
        self.source = source.encode()
        self.sha = hashlib.sha1(self.source).hexdigest().encode()  # noqa: S324  Redis names scripts so
        self.read = read
        self.guarded = guarded
        self.one_way = one_way
        self.positive = frozenset(positive)


_registered: list[Script] = []


def register(*scripts: Script) -> None:
    """Have every node know *scripts* from the moment it is connected."""
    _registered.extend(scripts)


def registered() -> tuple[Script, ...]:
    """Return the scripts that every node is to know."""
    return tuple(_registered)


ACQUIRE = Script(GUARD + ACQUIRE_LUA, read_vote, guarded=True)
RENEW = Script(
    GUARD + RENEW_LUA, read_vote, guarded=True, positive=(VoteKind.GRANTED, VoteKind.REPAIRED)
)
RELEASE = Script(CONSTANTS + RELEASE_LUA, read_release, guarded=False, one_way=True)
ENROL = Script(GUARD + HISTORY + ENROL_LUA, read_vote, guarded=False)
MARK = Script(MARK_LUA, read_release, guarded=False, one_way=True)
INSPECT = Script(GUARD + INSPECT_LUA, read_vote, guarded=False)
PROBE = Script(GUARD + HISTORY + PROBE_LUA, read_vote, guarded=True)
register(ACQUIRE, RENEW, RELEASE, ENROL, MARK, INSPECT, PROBE)
