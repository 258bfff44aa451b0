"""
Lua of the lock: the scripts that run inside a node.

A lock's value is ``token`` (40 characters) followed by the holder's description, as JSON. Only
the token is compared; in RELEASE the owner's part of it suffices.
"""

from __future__ import annotations

from celery_redlock.lock.records import CHANNEL_LENGTH, OWNER_LENGTH, RELEASE_LENGTH
from celery_redlock.lock.scripts.scripting import (
    CONSTANTS,
    FENCE,
    GUARD,
    HEAD,
    LAPSE,
    LAPSES,
    VALUE,
    Script,
    read_release,
    register,
    replies,
)
from celery_redlock.lock.scripts.votes import VoteKind

__all__ = ["ACQUIRE", "ENROL", "INSPECT", "MARK", "PLACES", "PROBE", "RELEASE", "RENEW"]

#: How many are passed in a line, at most, to find one who can be told [counted].
MOST_PASSED = 100

# Whether the node was a replica since it was asked last: it then has what its master had, perhaps
# an older copy of its own data, marker and run id included. Its replication id is another one after
# that. So it is after a first replica came, or the last one went; there is no second id then.
HISTORY = """
local function was_replica(boot)
  local info = redis.call('INFO', 'replication')
  local id, second = string.match(info, 'master_replid:(%x+)'), string.match(info, 'replid2:(%x+)')
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
local code, left = may_vote(found, held_back, KEYS[4], KEYS[5], ARGV[8], ARGV[7])
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
  fence = whole(f)
  redis.call('SET', KEYS[2], fence, 'PX', ARGV[5])
end
redis.call('SET', KEYS[1], ARGV[1] .. ARGV[2], 'PX', ARGV[3])
remember(KEYS[4], ARGV[7])
return {1, now, fence}
"""

# KEYS 1 lock 2 fence 3 boot 4 quarantine
# ARGV 1 token 2 info 3 ttl 4 fence or '0' 5 fence retention 6 skew allowed 7 repair ('1' or '0')
#      8 quarantine or '0' 9 boot id
RENEW_LUA = """
local now = now_ms()
local cur, seen, found, held_back = unpack(redis.call('MGET', unpack(KEYS)))
local code, left = may_vote(found, held_back, KEYS[3], KEYS[4], ARGV[9], ARGV[8])
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
  fence = whole(f)
  redis.call('SET', KEYS[2], fence, 'PX', ARGV[5])
end
if code ~= 1 then return {code, now, left} end
remember(KEYS[3], ARGV[8])
return {kind, now, fence}
"""

# `hint` tells the process of the oldest in *line* who can have the place *number* that it may be
# free, and takes that one out of the line: who tries in vain gets in again, so that one who does
# nothing delays the others by one hint. A member is who waits, its channel, and how many places the
# lock has for it. Those whose process does not listen any more are passed. An answer that is no
# number is a lack of rights, or somebody else's key: then nobody can be told, and all come by
# themselves.
HINT = (
    f"local WHO, CHANNEL, PASSED, RELEASE = "
    f"{OWNER_LENGTH}, {CHANNEL_LENGTH}, {MOST_PASSED}, {RELEASE_LENGTH}"
    """
local function hint(line, channels, number, release)
  local oldest = redis.pcall('ZRANGE', line, '0', PASSED - 1)
  if oldest.err then return end
  for _, one in ipairs(oldest) do
    if (tonumber(string.sub(one, WHO + CHANNEL + 1)) or 0) > tonumber(number) then
      if type(redis.pcall('ZREM', line, one)) ~= 'number' then return end
      local channel = channels .. string.sub(one, WHO + 1, WHO + CHANNEL)
      local heard = redis.pcall('PUBLISH', channel, release .. string.sub(one, 1, WHO) .. line)
      if type(heard) ~= 'number' or heard > 0 then return end
    end
  end
end
"""
)

# KEYS 1 lock 2 marker, or the lock again for none: a user may be allowed our keys only. What is
#      done stays done: a child that was killed while it finished may speak last
#      3 the line of those who wait, or the lock again to tell nobody
# ARGV 1 token, or its owner's part of it 2 keep the key for so long yet, or '0' 3 marker value
#      4 marker ttl 5 what channels begin with 6 number of the place
RELEASE_LUA = (
    """
local cur = redis.call('GET', KEYS[1])
local mine = cur and #ARGV[1] >= OWNER and string.sub(cur, 1, #ARGV[1]) == ARGV[1]
if mine and ARGV[2] ~= '0' then redis.call('PEXPIRE', KEYS[1], ARGV[2])
elseif mine then redis.call('DEL', KEYS[1])
end
if (mine or not cur) and ARGV[2] == '0' and KEYS[3] ~= KEYS[1]
  and redis.pcall('EXISTS', KEYS[3]) == 1 then
"""
    # Only here: where nobody waits, making the function would take longer than looking.
    + HINT
    + """
  hint(KEYS[3], ARGV[5], ARGV[6], string.sub(ARGV[1], -RELEASE))
end
if KEYS[2] ~= KEYS[1] and (ARGV[3] == 'done' or redis.call('GET', KEYS[2]) ~= 'done') then
  redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
end
return {mine and 1 or 0, 0}
"""
)

# KEYS 1 boot 2 quarantine
# ARGV 1 boot id 2 quarantine 3 'look', 'trust', 'quarantine' or 'bootstrap'
#      4 for 'quarantine', if a part of one is enough for a node that is not enrolled: how long
# Answers the state found, the clock, what is left of a quarantine, and the marker found. A node
# that has evicted keys, its marker perhaps, is not trusted: its marker would have their count.
ENROL_LUA = """
local now = now_ms()
local found = redis.call('GET', KEYS[1])
if ARGV[3] == 'bootstrap' then
  redis.call('SET', KEYS[1], ARGV[1] .. evicted(), 'PX', REMEMBERED)
  was_replica(KEYS[1])
  redis.call('DEL', KEYS[2])
  return {'enrolled', now, 0, ARGV[1]}
end
if not found and ARGV[3] == 'look' then return {'unmarked', now, 0, ''} end
if not found and (ARGV[3] == 'trust' or ARGV[4]) then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', REMEMBERED)
  if ARGV[4] and redis.call('PTTL', KEYS[2]) < tonumber(ARGV[4]) then
    redis.call('SET', KEYS[2], '1', 'PX', ARGV[4])
  end
elseif found and string.sub(without_count(found), 41) ~= string.sub(ARGV[1], 41) then
  return {'foreign', now, 0, found}
end
if was_replica(KEYS[1]) then redis.call('SET', KEYS[2], '1', 'PX', ARGV[2]) end
local held_back = redis.call('EXISTS', KEYS[2]) == 1
found = redis.call('GET', KEYS[1])
local code, left = may_vote(found, held_back, KEYS[1], KEYS[2], ARGV[1] .. '+', ARGV[2])
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


# KEYS the places of a lock
# ARGV 1 an execution, or '' 2 '1' to have told when the first of them lapses
# Answers for each whether it is free ('0'), taken ('1'), or taken by that execution ('2'); and when
# that is.
PLACES_LUA = """
local taken = redis.call('MGET', unpack(KEYS))
for i, value in ipairs(taken) do
  local is_its = value and ARGV[1] ~= '' and string.find(value, ARGV[1], TOKEN, true)
  taken[i] = is_its and '2' or value and '1' or '0'
end
return {1, now_ms(), table.concat(taken), ARGV[2] == '1' and lapse(KEYS, 1) or 0}
"""


# KEYS 1 boot 2 quarantine 3 is written: a node that takes no writes does not vote
# ARGV 1 quarantine or '0' 2 boot id
PROBE_LUA = """
local now = now_ms()
redis.call('SET', KEYS[3], '1', 'PX', '1000')
if ARGV[1] ~= '0' and was_replica(KEYS[1]) then redis.call('SET', KEYS[2], '1', 'PX', ARGV[1]) end
local found, held_back = unpack(redis.call('MGET', KEYS[1], KEYS[2]))
local code, left = may_vote(found, held_back, KEYS[1], KEYS[2], ARGV[2] .. '+', ARGV[1])
if code ~= 1 then return {code, now, left} end
remember(KEYS[1], ARGV[1])
remember(KEYS[1] .. ':history', ARGV[1])
return {1, now, '0'}
"""


#: What a yes is, and the number that comes with it.
YES = {1: (VoteKind.GRANTED, (FENCE,))}

ACQUIRE = Script(GUARD + ACQUIRE_LUA, replies(YES), guarded=True)
RENEW = Script(
    GUARD + RENEW_LUA,
    replies(YES | {2: (VoteKind.REPAIRED, (FENCE,))}),
    guarded=True,
    positive=(VoteKind.GRANTED, VoteKind.REPAIRED),
)
RELEASE = Script(CONSTANTS + RELEASE_LUA, read_release, guarded=False, one_way=True)
ENROL = Script(GUARD + HISTORY + ENROL_LUA, replies({}), guarded=False)
MARK = Script(MARK_LUA, read_release, guarded=False, one_way=True)
INSPECT = Script(
    HEAD + INSPECT_LUA,
    replies({2: (VoteKind.GRANTED, (FENCE,))}),
    guarded=False,
    writes=False,
    positive=(),
)
PLACES = Script(
    HEAD + LAPSE + PLACES_LUA,
    replies({1: (VoteKind.GRANTED, (VALUE, LAPSES))}),
    guarded=False,
    writes=False,
    positive=(),
)
PROBE = Script(GUARD + HISTORY + PROBE_LUA, replies(YES), guarded=True)
register(ACQUIRE, RENEW, RELEASE, ENROL, MARK, INSPECT, PLACES, PROBE)
