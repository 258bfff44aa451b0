"""
The reservation inside a node: which message stands for a name, and which comes next.

    queued:<name>   the task that is queued or running
    next:<name>     the one that waits for it to end; only where triggers are merged

Each is a hash with an expiry:

    token    of the owner, whose message carries it
    info     description of the owner, as JSON
    until    up to when it stands by itself [node's ms]
    window   up to when it stands after a failure, if it does [node's ms]
    lock     token of the lock that its task runs under: it stands as long as that is held
    started  execution that started it, or `-`; empty while it waits for the first time, and only
             then can a trigger be merged into it
    newest   arguments of the newest trigger that was merged into it, as JSON
    version  of these arguments; a larger one is newer
    merged   how many triggers were
    by       owner of the newest one

A reservation that stands only by its lock ends with it: when a worker is killed, nobody has to
clear away. Replies are votes, as in `celery_redlock.lock.scripts.scripting`.
"""

from __future__ import annotations

import enum

from celery_redlock.lock.scripts.scripting import (
    AMOUNT,
    FENCE,
    GUARD,
    HEAD,
    TTL,
    VALUE,
    Script,
    read_release,
    register,
    replies,
)
from celery_redlock.lock.scripts.votes import VoteKind

__all__ = ["END", "RESERVE", "START", "ReservationVote"]


class ReservationVote(enum.Enum):
    """What a node answers besides a `VoteKind`."""

    NEXT = "next"
    MERGED = "merged"
    PASSED = "passed over"


RESERVATIONS = """
local function read(key)
  local t = redis.call('HMGET', key, 'token', 'info', 'until', 'window', 'lock', 'started',
    'version', 'merged', 'by')
  if not t[1] then return {key = key, token = '', info = '', lock = '', started = '', alone = 0,
    window = 0, version = 0, merged = 0} end
  return {key = key, token = t[1], info = t[2] or '', alone = tonumber(t[3]) or 0,
    window = tonumber(t[4]) or 0, lock = t[5] or '', started = t[6] or '',
    version = tonumber(t[7]) or 0, merged = tonumber(t[8]) or 0, by = t[9]}
end
local function left(m, now) return math.max(0, m.alone - now) end
local function runs(m, lock)
  return m.lock ~= '' and lock and string.sub(lock, 1, TOKEN) == m.lock
end
local function stands(m, now, lock) return m.alone > now or runs(m, lock) end
local function put(m, token, info, alone, window, started, life)
  local key = m.key
  if m.token ~= '' then redis.call('DEL', key) end
  redis.call('HSET', key, 'token', token, 'info', info, 'until', whole(alone),
    'window', whole(window), 'started', started)
  redis.call('PEXPIRE', key, life)
end
"""

# KEYS 1 queued 2 next 3 lock 4 boot 5 quarantine
# ARGV 1 token 2 info 3 life 4 window 5 '' while a trigger can be merged into it 6 arguments, or ''
#      where triggers are not merged 7 their version 8 how long merged ones are kept
#      9 quarantine or '0' 10 boot id
RESERVE_LUA = """
local now = now_ms()
local lock, found, held_back = unpack(redis.call('MGET', KEYS[3], KEYS[4], KEYS[5]))
local code, wait = may_vote(found, held_back, KEYS[4], KEYS[5], ARGV[10], ARGV[9])
if code ~= 1 then return {code, now, wait} end
local function reserve(m, how, before)
  local later = how == 3 and left(before, now) + 1000 or 0
  if m.token ~= ARGV[1] then
    local life = later + tonumber(ARGV[3])
    put(m, ARGV[1], ARGV[2], now + life, now + later + tonumber(ARGV[4]), ARGV[5], whole(life))
  end
  remember(KEYS[4], ARGV[9])
  return {how, now, '0', left(before, now), before.token .. before.info, 0}
end
local function refuse(m)
  local ttl = math.max(left(m, now), m.lock ~= '' and redis.call('PTTL', KEYS[3]) or 0)
  return {0, now, ttl, m.token .. m.info, '0'}
end
local function merge(m)
  if m.started ~= '' then return refuse(m) end
  local version, merged = tonumber(ARGV[7]), m.merged
  local mine = string.sub(ARGV[1], 1, OWNER)
  if version <= m.version then
    return {4, now, whole(m.version + 1), left(m, now), m.token .. m.info, merged}
  end
  if m.by ~= mine then merged = merged + 1 end
  redis.call('HSET', m.key, 'newest', ARGV[6], 'version', whole(version), 'merged', whole(merged),
    'by', mine)
  keep(m.key, ARGV[8])
  return {4, now, whole(version), left(m, now), m.token .. m.info, merged}
end
local current = read(KEYS[1])
local others = current.token ~= ARGV[1] and stands(current, now, lock)
if others and ARGV[6] == '' then return refuse(current) end
local next = read(KEYS[2])
if next.token ~= ARGV[1] and stands(next, now, false) then
  return ARGV[6] ~= '' and merge(next) or refuse(next)
end
if others then
  if current.started == '' then return merge(current) end
  return reserve(next, 3, current)
end
if next.token == ARGV[1] then
  redis.call('RENAME', KEYS[2], KEYS[1])
  current = next
end
return reserve(current, 1, current)
"""

# KEYS 1 queued 2 next 3 lock, held by who starts
# ARGV 1 token 2 info 3 token of the lock 4 execution 5 for how long the reservation is to stand by
#      itself from now: '0' as long as the lock is held, 'as it is', or 'over' to take it away
#      6 life of one that is published now 7 expiry
START_LUA = """
local now = now_ms()
local current, next = read(KEYS[1]), read(KEYS[2])
local mine = current
if current.token ~= ARGV[1] then
  local others = stands(current, now, redis.call('GET', KEYS[3]))
  if next.token == ARGV[1] then
    if others then return {0, now, left(current, now), current.token .. current.info, '0'} end
    mine = next
    redis.call('RENAME', KEYS[2], KEYS[1])
    if ARGV[5] == 'as it is' then
      local window = whole(now + tonumber(ARGV[6]))
      redis.call('HSET', KEYS[1], 'until', window, 'window', window)
      keep(KEYS[1], ARGV[6])
    end
  elseif others or next.token ~= '' or ARGV[5] == 'as it is' or ARGV[5] == 'over' then
    return {5, now}
  else
    put(current, ARGV[1], ARGV[2], now + tonumber(ARGV[5]), now, ARGV[4], ARGV[7])
    mine = read(KEYS[1])
  end
end
local newest = ''
if mine.started == '' or mine.started == ARGV[4] then
  newest = redis.call('HGET', KEYS[1], 'newest') or ''
end
if ARGV[5] == 'over' then redis.call('DEL', KEYS[1])
else
  redis.call('HSET', KEYS[1], 'lock', ARGV[3])
  if mine.started == '' or mine.started == '-' then
    redis.call('HSET', KEYS[1], 'started', ARGV[4])
  end
  if ARGV[5] ~= 'as it is' then
    redis.call('HSET', KEYS[1], 'until', whole(now + tonumber(ARGV[5])))
    redis.call('PEXPIRE', KEYS[1], ARGV[7])
  end
end
return {1, now, whole(mine.version), newest, mine.merged}
"""

# KEYS 1 queued 2 next 3 lock
# ARGV 1 token 2 'over'; 'idle' or 'unstarted' for the same unless the task runs, or has ever run;
#      'wait' for being queued again; 'hand' for being in a worker's hand; 'window' for standing as
#      first published; 'ran' for standing as it does, without merging
#      3 how long it is to stand by itself while it waits, or is in hand
END_LUA = """
local now, ended, how = now_ms(), 0, ARGV[2]
local lock = redis.call('GET', KEYS[3])
for i = 1, 2 do
  local key = KEYS[i]
  local m = read(key)
  local ran = m.started ~= '' and m.started ~= '-'
  local spare = (how == 'idle' and runs(m, lock)) or (how == 'unstarted' and ran)
  if m.token == ARGV[1] and not spare then
    ended = 1
    if how == 'ran' then
      if m.started == '' then redis.call('HSET', key, 'started', '-') end
    elseif how == 'hand' then
      redis.call('HSET', key, 'until', whole(now + tonumber(ARGV[3])))
      keep(key, ARGV[3])
    elseif how == 'wait' then
      local alone = math.max(m.alone, now + tonumber(ARGV[3]))
      redis.call('HSET', key, 'until', whole(alone))
      keep(key, whole(alone - now))
    elseif how == 'window' and m.window > now then
      redis.call('HSET', key, 'until', whole(m.window), 'lock', '')
      redis.call('PEXPIRE', key, whole(m.window - now))
    else redis.call('DEL', key) end
  end
end
return {ended, 0}
"""


#: What a node answers of a reservation: the version of the merged arguments, how long it still
#: stands by itself, whose it is, and how many triggers were merged.
OF_RESERVATION = (FENCE, TTL, VALUE, AMOUNT)

RESERVE = Script(
    GUARD + RESERVATIONS + RESERVE_LUA,
    replies(
        {
            1: (VoteKind.GRANTED, OF_RESERVATION),
            3: (ReservationVote.NEXT, OF_RESERVATION),
            4: (ReservationVote.MERGED, OF_RESERVATION),
        }
    ),
    guarded=True,
    positive=(VoteKind.GRANTED, ReservationVote.NEXT, ReservationVote.MERGED),
)
START = Script(
    HEAD + RESERVATIONS + START_LUA,
    replies({1: (VoteKind.GRANTED, (FENCE, VALUE, AMOUNT)), 5: (ReservationVote.PASSED, ())}),
    guarded=False,
    one_way=True,
)
END = Script(HEAD + RESERVATIONS + END_LUA, read_release, guarded=False, one_way=True)
register(RESERVE, START, END)
