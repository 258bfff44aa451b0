"""
The burst inside a node: which call of a lock name is the newest, and when the burst ends at last.

    debounce:<name>   a hash with an expiry

    number    of the newest call; a larger one is newer
    newest    publish id of the newest call; empty when its message was claimed: no burst is open
    task      its task id, whether or not it was claimed
    deadline  when the burst ends at last [node's ms]
    last      publish ids of the calls that were the last of their bursts: each of these runs

Nothing here protects anybody: whatever a node has lost, or was never told, makes one run more.
"""

from __future__ import annotations

import enum

from celery_redlock.lock.scripts.scripting import (
    FENCE,
    HEAD,
    TTL,
    VALUE,
    Script,
    read_release,
    register,
    replies,
)
from celery_redlock.lock.scripts.votes import VoteKind

__all__ = ["CALL", "CLAIM", "LOOK", "BurstVote"]

#: How many calls a node remembers as the last of their bursts, and the length of an id.
MOST_LAST, ID_LENGTH = 32, 32


class BurstVote(enum.Enum):
    """What a node answers besides a `VoteKind`."""

    SUPERSEDED = "superseded"


BURSTS = f"""
local function with(id, last) return string.sub(id .. (last or ''), 1, {MOST_LAST * ID_LENGTH}) end
"""

# KEYS 1 burst
LOOK_LUA = """
local now = now_ms()
local number, newest, task, deadline = unpack(
  redis.call('HMGET', KEYS[1], 'number', 'newest', 'task', 'deadline'))
local left = (tonumber(deadline) or 0) - now
if (newest or '') == '' or left <= 0 then left, task = 0, '' end
return {1, now, number or '0', left, task or ''}
"""

# KEYS 1 burst
# ARGV 1 publish id 2 task id 3 number 4 how long a burst may last 5 '1' for a call that has met no
#      burst 6 expiry
CALL_LUA = """
local now = now_ms()
local number, newest, deadline, last = unpack(
  redis.call('HMGET', KEYS[1], 'number', 'newest', 'deadline', 'last'))
if tonumber(ARGV[3]) <= (tonumber(number) or 0) then return {0, 0} end
deadline = tonumber(deadline) or 0
local is_over = ARGV[5] == '1' and now >= deadline
if (newest or '') == '' then is_over = true
elseif is_over then last = with(newest, last) end
if is_over then deadline = now + tonumber(ARGV[4]) end
redis.call('HSET', KEYS[1], 'number', ARGV[3], 'newest', ARGV[1], 'task', ARGV[2],
  'deadline', whole(deadline), 'last', last or '')
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return {1, 0}
"""

# KEYS 1 burst 2 finished marker of the execution
# ARGV 1 publish id 2 number
CLAIM_LUA = """
local now = now_ms()
local number, newest, task, last = unpack(
  redis.call('HMGET', KEYS[1], 'number', 'newest', 'task', 'last'))
if newest == ARGV[1] then
  redis.call('HSET', KEYS[1], 'newest', '', 'last', with(newest, last))
elseif (tonumber(number) or 0) > tonumber(ARGV[2])
  and not string.find(last or '', ARGV[1], 1, true)
  and redis.call('EXISTS', KEYS[2]) == 0 then
  return {2, now, task or ''}
end
return {1, now}
"""

LOOK = Script(
    HEAD + LOOK_LUA,
    replies({1: (VoteKind.GRANTED, (FENCE, TTL, VALUE))}),
    guarded=False,
    writes=False,
)
CALL = Script(HEAD + BURSTS + CALL_LUA, read_release, guarded=False, one_way=True)
CLAIM = Script(
    HEAD + BURSTS + CLAIM_LUA,
    replies({1: (VoteKind.GRANTED, ()), 2: (BurstVote.SUPERSEDED, (VALUE,))}),
    guarded=False,
    one_way=True,
)
register(LOOK, CALL, CLAIM)
