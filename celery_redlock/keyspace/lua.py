"""
The library's Lua scripts, run in this process as a Redis server runs them.

One interpreter for all nodes of a process, Lua 5.1 as in Redis, and each script compiled once.
Besides ``redis.call`` and ``redis.pcall`` a script can only count, compare and
write text: it has no files, no clock, and no global variables of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from celery_redlock.keyspace.values import Refused, Status

try:
    from lupa import lua51
except ImportError as error:  # or one without this Lua
    raise ModuleNotFoundError(
        "nodes that are no Redis run the locks' Lua scripts in this process, which needs lupa "
        "with Lua 5.1: pip install 'celery-redlock[testing]', or [postgresql], or [sqlite]",
        name="lupa",
    ) from error

__all__ = ["ERROR", "Script", "compiled", "crossing", "run"]

#: A compiled script.
Script = Any
#: Does a command, and returns what `crossing` makes of its reply.
Call = Callable[..., tuple[Any, ...]]

# What crosses between Lua and Python: first one of these, then the value, or an array's parts.
VALUE, ARRAY, STATUS, ERROR = range(4)

PRELUDE = """
local VALUE, ARRAY, STATUS, ERROR = 0, 1, 2, 3
local call  -- does a command at the node whose script is running

-- What a script sees. What is not listed here is not there.
local seen = {KEYS = {}, ARGV = {}, redis = {}}
for _, name in ipairs({
  'assert', 'error', 'getmetatable', 'ipairs', 'math', 'next', 'pairs', 'pcall', 'rawequal',
  'rawget', 'rawset', 'select', 'setmetatable', 'string', 'table', 'tonumber', 'tostring', 'type',
  'unpack', 'xpcall'
}) do seen[name] = _G[name] end
setmetatable(seen, {
  __index = function(_, name)
    error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
  end,
  __newindex = function() error('Attempt to modify a readonly table', 2) end
})

local function replied(kind, ...)
  if kind == VALUE then return (...) end
  if kind == ARRAY then return {...} end
  if kind == STATUS then return {ok = (...)} end
  return {err = (...)}
end
local function or_end(kind, ...)
  if kind == ERROR then error({err = (...)}, 0) end
  return replied(kind, ...)
end
seen.redis.call = function(...) return or_end(call(...)) end
seen.redis.pcall = function(...) return replied(call(...)) end

local function answered(value)
  if type(value) == 'table' then
    if type(rawget(value, 'err')) == 'string' then return ERROR, value.err end
    if type(rawget(value, 'ok')) == 'string' then return STATUS, value.ok end
    local length = 0
    while rawget(value, length + 1) ~= nil do length = length + 1 end
    return ARRAY, length, unpack(value, 1, length)
  end
  local kind = type(value)
  if kind == 'string' or kind == 'number' or kind == 'boolean' then return VALUE, value end
  return VALUE, nil
end

local function ended(is_well, value)
  if is_well then return answered(value) end
  if type(value) == 'table' then return ERROR, value.err end
  if type(value) == 'userdata' then error(value, 0) end  -- of Python: a defect here, and no reply
  return ERROR, 'ERR ' .. tostring(value)
end
local function run(script, node, keys, ...)
  local given, KEYS, ARGV = {...}, {}, {}
  for i = 1, keys do KEYS[i] = given[i] end
  for i = keys + 1, select('#', ...) do ARGV[i - keys] = given[i] end
  local before, names, words = call, seen.KEYS, seen.ARGV
  call, seen.KEYS, seen.ARGV = node, KEYS, ARGV
  local kind, value = pcall(script)
  call, seen.KEYS, seen.ARGV = before, names, words
  return ended(kind, value)
end

local function compiled(source)
  local script, problem = loadstring(source, '@user_script')
  return script and setfenv(script, seen), problem
end
return run, answered, compiled
"""

_lua = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False)
_run, _answered, _compiled = _lua.execute(PRELUDE)


@cache
def compiled(source: bytes) -> Script:
    script, problem = _compiled(source)
    if script is None:
        raise Refused(
            f"ERR Error compiling script (new function): {problem.decode(errors='replace')}"
        )
    return script


def run(script: Script, call: Call, keys: int, words: Sequence[bytes]) -> Any:
    """
    Return the reply of a compiled *script*, as *call* would be given it.

    The first *keys* of *words* are its keys, the others its arguments. *call* does the commands
    that it calls. Raises Refused if the script fails, or answers with an error.
    """
    return reply_of(*_run(script, call, keys, *words))


def reply_of(kind: int, value: Any, *parts: Any) -> Any:
    if kind == ARRAY:
        return [part if type(part) is bytes else converted(part) for part in parts]
    if kind == ERROR:
        raise Refused((value or b"ERR unknown error").decode(errors="replace"))
    return converted(value)


def converted(value: Any) -> Any:
    """Return what Lua has as a part of a reply: numbers are cut off, and false is nil."""
    kind = type(value)
    if kind is int or kind is bytes or value is None:
        return value
    if kind is bool:
        return 1 if value else None
    if kind is float:
        return int(value) if abs(value) < 2.0**63 else -(2**63)
    try:
        return reply_of(*_answered(value))
    except Refused as refused:
        return refused.reply


def crossing(reply: Any) -> Any:
    """Return the reply of a command as it crosses to Lua; nil is false there."""
    kind = type(reply)
    if kind is list:
        return (ARRAY, *[False if one is None else one for one in reply])
    if kind is Status:
        return (STATUS, reply)
    return (VALUE, False if reply is None else reply)
