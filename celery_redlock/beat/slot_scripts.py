"""
The slot record inside a node: how far the slots of a schedule's entry have been published.

    slot:<name>   a hash with an expiry:

    slot     the last one that was claimed [ms, Unix time]
    token    of the term in which it was
    fence    number of that term
    state    `claimed`, or `settled` once it was published or is never to be
    back     the one before it, which was settled; to be restored if the claim is withdrawn
    at       when it was claimed [node's ms]
    doubt    is there while an earlier term may have published it

Replies are votes, as in `celery_redlock.lock.scripts.scripting`.
"""

from __future__ import annotations

import enum

from celery_redlock.lock.scripts.scripting import (
    GUARD,
    HEAD,
    TTL,
    VALUE,
    Script,
    fence_in,
    read_release,
    register,
    replies,
)
from celery_redlock.lock.scripts.votes import VoteKind

__all__ = ["CLAIM", "LOOK", "SETTLE", "WITHDRAW", "SlotVote"]


class SlotVote(enum.Enum):
    """Answers of a node besides those of a `VoteKind`."""

    #: Granted, but an earlier term may have published it.
    UNCERTAIN = "granted, claimed before"
    #: It, or a later one, was published.
    PUBLISHED = "published before"
    #: A newer term has begun.
    DEPOSED = "deposed"


# KEYS 1 record 2 lock of the task, or the record again for none 3 boot 4 quarantine
# ARGV 1 slot [ms, Unix] 2 token of the term 3 its fence 4 skew allowed 5 expiry
#      6 the age at which a claim of an earlier term is over 7 quarantine or '0' 8 boot id
CLAIM_LUA = """
local now = now_ms()
local found, held_back = unpack(redis.call('MGET', KEYS[3], KEYS[4]))
local code, left = may_vote(found, held_back, KEYS[3], KEYS[4], ARGV[8], ARGV[7])
if code ~= 1 then return {code, now, left} end
local slot, fence = tonumber(ARGV[1]), tonumber(ARGV[3])
if slot > now + tonumber(ARGV[4]) then return {-5, now} end
local r = redis.call('HMGET', KEYS[1], 'slot', 'token', 'fence', 'state', 'doubt', 'at')
local last, before, doubt = tonumber(r[1] or '-1'), tonumber(r[3] or '0'), r[5]
if fence < before then return {8, now} end
local ours = r[2] == ARGV[2]
if slot < last or (slot == last and r[4] == 'settled') then return {7, now} end
if slot == last and not ours then
  local left = tonumber(r[6] or '0') + tonumber(ARGV[6]) - now
  if fence == before or left > 0 then return {0, now, math.max(left, 0), r[2], '0'} end
end
if slot > last then
  redis.call('HSET', KEYS[1], 'back', r[1] or '')
  redis.call('HDEL', KEYS[1], 'doubt')
  doubt = false
elseif not ours then
  redis.call('HSET', KEYS[1], 'doubt', '1')
  doubt = true
end
redis.call('HSET', KEYS[1], 'slot', ARGV[1], 'token', ARGV[2], 'fence', ARGV[3], 'state', 'claimed',
  'at', whole(now))
redis.call('PEXPIRE', KEYS[1], ARGV[5])
remember(KEYS[3], ARGV[7])
local holder, ttl = '', 0
if KEYS[2] ~= KEYS[1] then
  holder = redis.call('GET', KEYS[2]) or ''
  ttl = redis.call('PTTL', KEYS[2])
end
return {doubt and 6 or 1, now, ttl, holder}
"""

# KEYS 1 record
# ARGV 1 slot 2 token 3 fence 4 expiry
SETTLE_LUA = """
local r = redis.call('HMGET', KEYS[1], 'slot', 'fence')
local slot, last = tonumber(ARGV[1]), tonumber(r[1] or '-1')
if slot > last then
  redis.call('HSET', KEYS[1], 'slot', ARGV[1], 'token', ARGV[2])
  if tonumber(ARGV[3]) > tonumber(r[2] or '0') then
    redis.call('HSET', KEYS[1], 'fence', ARGV[3])
  end
end
if slot >= last then
  redis.call('HSET', KEYS[1], 'state', 'settled')
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
return {1, 0}
"""

# KEYS 1 record
# ARGV 1 slot 2 token
WITHDRAW_LUA = """
local r = redis.call('HMGET', KEYS[1], 'slot', 'token', 'state', 'back', 'doubt')
if r[1] ~= ARGV[1] or r[2] ~= ARGV[2] or r[3] ~= 'claimed' or r[5] then return {0, 0} end
if (r[4] or '') == '' then redis.call('HDEL', KEYS[1], 'slot', 'token', 'state')
else redis.call('HSET', KEYS[1], 'slot', r[4], 'state', 'settled') end
return {1, 0}
"""

# KEYS 1 record
LOOK_LUA = """
local r = redis.call('HMGET', KEYS[1], 'slot', 'state')
return {1, now_ms(), r[1] or '', r[2] or ''}
"""


CLAIM = Script(
    GUARD + CLAIM_LUA,
    replies(
        {  # the value is that of the lock that was asked for
            1: (VoteKind.GRANTED, (TTL, VALUE)),
            6: (SlotVote.UNCERTAIN, (TTL, VALUE)),
            7: (SlotVote.PUBLISHED, ()),
            8: (SlotVote.DEPOSED, ()),
        }
    ),
    guarded=True,
    positive=(VoteKind.GRANTED, SlotVote.UNCERTAIN),
)
SETTLE = Script(SETTLE_LUA, read_release, guarded=False, one_way=True)
WITHDRAW = Script(WITHDRAW_LUA, read_release, guarded=False, one_way=True)
#: The last slot is the fence, none is 0; the value is its state.
SLOT = ("fence", lambda value: fence_in(value or b"0"))
LOOK = Script(
    HEAD + LOOK_LUA,
    replies({1: (VoteKind.GRANTED, (SLOT, VALUE))}),
    guarded=False,
    writes=False,
)
register(CLAIM, SETTLE, WITHDRAW, LOOK)
