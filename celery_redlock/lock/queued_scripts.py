"""
The queued marker inside a node: which message stands for a name, and which comes next.

    queued:<name>   the task that is queued or running
    next:<name>     the one that waits for it to end; only where triggers are merged

Each is a hash with an expiry:

    token    of the owner, whose message carries it
    info     what the owner tells of itself, as JSON
    until    up to when it stands by itself [node's ms]
    window   `until` as it was at the publish
    lock     token of the lock that its task runs under: it stands as long as that is held
    waiting  1 until its task has started: only then can a trigger be merged into it
    newest   arguments of the newest trigger that was merged into it, as JSON
    version  of these arguments; a larger one is newer
    merged   how many triggers were
    by       owner of the newest one

A marker that stands only by its lock ends with it: when a worker is killed, nobody has to
clear away. Replies are votes, as in `celery_redlock.lock.scripts`.
"""

from __future__ import annotations

from typing import Any

from celery_redlock.lock.scripts import GUARD, Script, read_release, read_vote
from celery_redlock.lock.votes import Vote, VoteKind

__all__ = ["END", "ENQUEUE", "QUEUED_SCRIPTS", "START"]

MARKERS = """
local function read(key)
  local m = {key = key}
  local names = {'token', 'info', 'until', 'window', 'lock', 'waiting', 'newest', 'version',
    'merged', 'by'}
  for i, value in ipairs(redis.call('HMGET', key, unpack(names))) do m[names[i]] = value or '' end
  return m
end
local function alone(m, now) return math.max(0, (tonumber(m['until']) or now) - now) end
local function stands(m, now, lock)
  if m.token == '' then return false end
  if alone(m, now) > 0 then return true end
  return m.lock ~= '' and lock and string.sub(lock, 1, TOKEN) == m.lock
end
local function whole(n) return string.format('%.0f', n) end
local function put(key, token, info, till, waiting, life)
  redis.call('DEL', key)
  redis.call('HSET', key, 'token', token, 'info', info, 'until', whole(till),
    'window', whole(till), 'waiting', waiting, 'version', '0', 'merged', '0')
  redis.call('PEXPIRE', key, life)
end
"""

# KEYS 1 queued 2 next 3 lock 4 boot 5 quarantine
# ARGV 1 token 2 info 3 life 4 arguments, or '' where triggers are not merged 5 their version
#      6 quarantine or '0' 7 boot id
ENQUEUE_LUA = """
local now = now_ms()
local lock, found, held_back = unpack(redis.call('MGET', KEYS[3], KEYS[4], KEYS[5]))
local code, left = standing(found, held_back, KEYS[4], KEYS[5], ARGV[7], ARGV[6])
if code ~= 1 then return {code, now, left} end
local function enqueue(key, how, before)
  put(key, ARGV[1], ARGV[2], now + tonumber(ARGV[3]), '1', ARGV[3])
  if ARGV[6] ~= '0' then redis.call('PEXPIRE', KEYS[4], REMEMBERED) end
  return {how, now, '0', alone(before, now), before.token .. before.info, 0}
end
local function refuse(m)
  local ttl = math.max(alone(m, now), m.lock ~= '' and redis.call('PTTL', KEYS[3]) or 0)
  return {0, now, ttl, m.token .. m.info, '0'}
end
local function merge(m)
  local version, merged = tonumber(ARGV[5]), tonumber(m.merged)
  local mine = string.sub(ARGV[1], 1, OWNER)
  if m.by ~= mine then merged = merged + 1 end
  if version <= tonumber(m.version) then version = tonumber(m.version) + 1 end
  redis.call('HSET', m.key, 'newest', ARGV[4], 'version', whole(version), 'merged', whole(merged),
    'by', mine)
  return {4, now, whole(version), alone(m, now), m.token .. m.info, merged}
end
local current, next = read(KEYS[1]), read(KEYS[2])
if next.token ~= ARGV[1] and stands(next, now, false) then
  return ARGV[4] ~= '' and merge(next) or refuse(next)
end
if current.token ~= ARGV[1] and stands(current, now, lock) then
  if ARGV[4] == '' then return refuse(current) end
  if current.waiting == '1' then return merge(current) end
  return enqueue(KEYS[2], 3, current)
end
return enqueue(KEYS[1], 1, current)
"""

# KEYS 1 queued 2 next 3 lock, held by who starts
# ARGV 1 token 2 info 3 token of the lock 4 for how long the marker is to stand by itself from now:
#      '0' as long as the lock is held, 'as it is', or 'over' to take it away 5 expiry
START_LUA = """
local now = now_ms()
local current, next = read(KEYS[1]), read(KEYS[2])
local mine = current
if current.token ~= ARGV[1] then
  local others = stands(current, now, redis.call('GET', KEYS[3]))
  if next.token == ARGV[1] then
    if others then
      return {0, now, alone(current, now), current.token .. current.info, '0'}
    end
    mine = next
    redis.call('RENAME', KEYS[2], KEYS[1])
  elseif others or next.token ~= '' or ARGV[4] == 'as it is' or ARGV[4] == 'over' then
    return {5, now}
  else
    put(KEYS[1], ARGV[1], ARGV[2], now + tonumber(ARGV[4]), '0', ARGV[5])
    mine = read(KEYS[1])
  end
end
if ARGV[4] == 'over' then redis.call('DEL', KEYS[1])
else
  redis.call('HSET', KEYS[1], 'waiting', '0', 'lock', ARGV[3])
  if ARGV[4] ~= 'as it is' then
    redis.call('HSET', KEYS[1], 'until', whole(now + tonumber(ARGV[4])))
    redis.call('PEXPIRE', KEYS[1], ARGV[5])
  end
end
return {1, now, mine.version, mine.newest, tonumber(mine.merged)}
"""

# KEYS 1 queued 2 next
# ARGV 1 token 2 'over', 'wait' for being queued again, 'window' for standing as first published
#      3 how long it is to stand by itself while it waits
END_LUA = """
local now, ended = now_ms(), 0
for _, key in ipairs(KEYS) do
  local m = read(key)
  if m.token == ARGV[1] then
    ended = 1
    if ARGV[2] == 'wait' then
      local till = math.max(tonumber(m['until']), now + tonumber(ARGV[3]))
      redis.call('HSET', key, 'until', whole(till))
      redis.call('PEXPIRE', key, whole(till - now))
    elseif ARGV[2] == 'window' and tonumber(m.window) > now then
      redis.call('HSET', key, 'until', m.window, 'lock', '')
      redis.call('PEXPIRE', key, whole(tonumber(m.window) - now))
    else redis.call('DEL', key) end
  end
end
return {ended, 0}
"""


def read_enqueued(reply: Any) -> Vote:
    """Return the vote in the reply of `ENQUEUE`."""
    code, now = reply[0], reply[1] / 1000.0
    kinds = {1: VoteKind.GRANTED, 3: VoteKind.NEXT, 4: VoteKind.MERGED}
    if code not in kinds:
        return read_vote(reply)
    ttl = max(0, reply[3]) / 1000.0
    return Vote(kinds[code], int(reply[2]), ttl, reply[4], now, merged=reply[5])


def read_started(reply: Any) -> Vote:
    """Return the vote in the reply of `START`; the newest arguments are its value."""
    code, now = reply[0], reply[1] / 1000.0
    if code == 1:
        version = int(reply[2])
        return Vote(VoteKind.GRANTED, version, 0.0, reply[3], now, merged=reply[4])
    if code == 5:  # noqa: PLR2004  the codes are those of the scripts above
        return Vote(VoteKind.PASSED, node_now=now)
    return read_vote(reply)


ENQUEUE = Script(GUARD + MARKERS + ENQUEUE_LUA, read_enqueued, guarded=True)
START = Script(GUARD + MARKERS + START_LUA, read_started, guarded=False)
END = Script(GUARD + MARKERS + END_LUA, read_release, guarded=False)
QUEUED_SCRIPTS = (ENQUEUE, START, END)
