"""
The tally of what tasks did, by task and hour, on the lock nodes: runs, refusals, lengths of holds.

Each process adds what it has counted to a hash on every node, and nobody waits for it. A node that
is away misses some, so a reader (`celery_redlock.reading.tally_reader`) takes the largest of what
the nodes say. An hour is kept for a week.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery_redlock.lock.records import encode_info, ms, object_in, record_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import Request
from celery_redlock.lock.scripts.scripting import Script, read_release, register
from celery_redlock.reading.holds import HOLD_BOUNDS, Holds
from celery_redlock.words import number

__all__ = [
    "CAUSES",
    "EXAMPLES",
    "FIELDS",
    "HOUR",
    "HOW",
    "REPORTED",
    "RETENTION",
    "Counts",
    "TaskTally",
    "hour_key",
    "largest",
    "read_counts",
    "tally_key",
    "tally_request",
    "together",
]

HOUR = 3600.0
#: How long an hour is kept after it was last added to [s]: a week.
RETENTION = 7 * 24 * 3600.0
#: Why an execution is refused, or a publish (``"duplicate"``), or that its lock was lost meanwhile.
CAUSES = (
    *("conflict", "rate", "deliveries", "unavailable", "redelivered", "finished", "unnamed"),
    *("duplicate", "lost", "debounced"),
)
#: Before what was only reported.
REPORTED = "reported:"
#: Fields that are not added up, but of which the smallest or largest, or the newest, is kept.
HOW = {"first": "<", "last": ">", "longest": ">", "ttl": ">"}
EXAMPLES = tuple(f"example:{cause}" for cause in CAUSES)
#: All fields. Times are in milliseconds.
FIELDS = (
    *("ran", *CAUSES),
    *(REPORTED + field for field in ("ran", *CAUSES)),
    *("held", *HOW),
    *(f"hold:{place}" for place in range(len(HOLD_BOUNDS) + 1)),
)
#: A longer example is not written: nothing that we write is.
LONGEST = 4096
#: Digits of a number that a node may say.
DIGITS = 15

# KEYS 1 tasks of the hour 2 tally ; ARGV 1 kept for how long 2 task, then field, how, value ...
RECORD_LUA = """
local fields, words = {}, {}
for i = 3, #ARGV, 3 do fields[#fields + 1] = ARGV[i] end
local known = redis.call('HMGET', KEYS[2], unpack(fields))
for i, field in ipairs(fields) do
  local how, value = ARGV[3 * i + 1], ARGV[3 * i + 2]
  local old, new = tonumber(known[i] or ''), tonumber(value)
  if old and how ~= '=' then
    if how == '+' then new = old + new
    elseif how == '>' then new = math.max(old, new)
    else new = math.min(old, new) end
    value = string.format('%.0f', new)
  end
  words[#words + 1], words[#words + 2] = field, value
end
redis.call('HSET', KEYS[2], unpack(words))
redis.call('PEXPIRE', KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[1], '0', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {1, 0}
"""
RECORD = Script(RECORD_LUA, read_release, guarded=False)
register(RECORD)


# --- one hash ------------------------------------------------------------------------------


class Counts(NamedTuple):
    numbers: dict[str, int]
    examples: dict[str, dict[str, Any]]


def hour_key(prefix: str, hour: int) -> bytes:
    """Return the key of the names of the tasks that did something in *hour*."""
    return record_key(prefix, "tally", str(hour))


def tally_key(prefix: str, hour: int, task: str) -> bytes:
    return record_key(prefix, "tally", f"{hour}:{task}")


def tally_request(rules: Rules, hour: int, task: str, counts: Counts) -> Request:
    """Return the request that adds *counts* to a node's tally; *hour* counts from 1970."""
    words = [ms(RETENTION), task.encode()]
    for name, value in counts.numbers.items():
        words += name.encode(), HOW.get(name, "+").encode(), b"%d" % value
    for name, record in counts.examples.items():
        line = encode_info(record)
        if len(line) <= LONGEST:
            words += name.encode(), b"=", line
    keys = hour_key(rules.prefix, hour), tally_key(rules.prefix, hour, task)
    return Request(RECORD, keys, tuple(words))


def read_counts(reply: Sequence[Any]) -> Counts:
    values = dict(zip((*FIELDS, *EXAMPLES), reply, strict=True))
    numbers = {name: natural(values[name]) for name in FIELDS}
    examples = {
        name: object_in(values[name]) for name in EXAMPLES if isinstance(values[name], bytes)
    }
    return Counts(
        {name: value for name, value in numbers.items() if value is not None},
        {name: record for name, record in examples.items() if record},
    )


def natural(value: object) -> int | None:
    is_number = isinstance(value, bytes) and value.isdigit() and len(value) <= DIGITS
    return int(value) if is_number else None  # type: ignore[call-overload]


def largest(nodes: Iterable[Counts]) -> Counts:
    return together(nodes, {field: HOW.get(field, ">") for field in FIELDS})


def together(parts: Iterable[Counts], how: Mapping[str, str]) -> Counts:
    """Return *parts* as one, each field as *how* says; else added up."""
    numbers: dict[str, int] = {}
    examples: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, value in part.numbers.items():
            sign = how.get(name, "+")
            if name not in numbers:
                numbers[name] = value
            elif sign == "+":
                numbers[name] += value
            else:
                numbers[name] = (max if sign == ">" else min)(numbers[name], value)
        for name, record in part.examples.items():
            if number(record.get("at")) >= number(examples.get(name, {}).get("at")):
                examples[name] = record
    return Counts(numbers, examples)


# --- a task over some hours ----------------------------------------------------------------


@dataclass(frozen=True)
class TaskTally:
    ran: int = 0  # executions that ran
    ran_reported: int = 0  # of these, in report mode
    refused: Mapping[str, int] = field(default_factory=dict)  # cause -> how many
    #: Cause -> how many would have been refused, and were not
    reported: Mapping[str, int] = field(default_factory=dict)
    holds: Holds = field(default_factory=Holds)
    #: Cause -> the newest record of it, as in the journal
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    first: float = 0.0  # when it was first and last heard of [s, Unix time]
    last: float = 0.0

    @classmethod
    def of(cls, hours: Sequence[Counts]) -> TaskTally:
        numbers, examples = together(hours, HOW)
        ttl = next((it.numbers["ttl"] for it in reversed(hours) if "ttl" in it.numbers), 0)

        def seconds(name: str) -> float:
            return numbers.get(name, 0) / 1000.0

        return cls(
            ran=numbers.get("ran", 0),
            ran_reported=numbers.get(f"{REPORTED}ran", 0),
            refused={cause: numbers[cause] for cause in CAUSES if numbers.get(cause)},
            reported={
                cause: numbers[REPORTED + cause]
                for cause in CAUSES
                if numbers.get(REPORTED + cause)
            },
            holds=Holds(
                tuple(numbers.get(f"hold:{place}", 0) for place in range(len(HOLD_BOUNDS) + 1)),
                seconds("held"),
                seconds("longest"),
                ttl / 1000.0,
            ),
            examples={name.partition(":")[2]: record for name, record in examples.items()},
            first=seconds("first"),
            last=seconds("last"),
        )
