"""
What tasks did, counted by task and hour on the lock nodes: runs, refusals, lengths of holds.

Each process adds what it has counted to a hash on every node, and nobody waits for it. A node that
is away misses some, so whoever reads takes the largest of what the nodes say. An hour is kept for
a week.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.exceptions import RedisError, ResponseError

from celery_redlock.lock.address import Address, addresses_of
from celery_redlock.lock.records import encode_info, object_in, record_key
from celery_redlock.lock.requests import Request
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripting import Script, ms, read_release, register
from celery_redlock.reading.holds import HOLD_BOUNDS, Holds
from celery_redlock.reading.nodes import ask_all, connected
from celery_redlock.words import number

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = [
    "CAUSES",
    "HOUR",
    "REPORTED",
    "RETENTION",
    "Counts",
    "Tallies",
    "TallyReader",
    "TaskTally",
    "tally_request",
]

HOUR = 3600.0
#: How long an hour is kept after it was last added to [s]: a week.
RETENTION = 7 * 24 * 3600.0
#: Why an execution is refused, or a publish (``"duplicate"``), or that its lock was lost meanwhile.
CAUSES = ("conflict", "unavailable", "redelivered", "finished", "duplicate", "lost")
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
#: Digits of a number that a node may say, and tasks of an hour that are read.
DIGITS, TASKS = 15, 10_000
#: Hashes that a node is asked for at once.
PAGE = 500

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
    """What is counted: numbers by their fields, and an example of each cause by its."""

    numbers: dict[str, int]
    examples: dict[str, dict[str, Any]]


def hour_key(prefix: str, hour: int) -> bytes:
    """Return the Redis key of the names of the tasks that did something in *hour*."""
    return record_key(prefix, "tally", str(hour))


def tally_key(prefix: str, hour: int, task: str) -> bytes:
    """Return the Redis key of what *task* did in *hour*."""
    return record_key(prefix, "tally", f"{hour}:{task}")


def tally_request(rules: Rules, hour: int, task: str, counts: Counts) -> Request:
    """
    Return what adds *counts* to a node's tally.

    Args:
        rules: Of the cluster.
        hour: Number of hours since 1970.
        task: Name of the task.
        counts: At least one.
    """
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
    """Return what a node says of `FIELDS` and `EXAMPLES`, less what others have written there."""
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
    """Return *value* if it is a number that we may have written."""
    is_number = isinstance(value, bytes) and value.isdigit() and len(value) <= DIGITS
    return int(value) if is_number else None  # type: ignore[call-overload]


def largest(nodes: Iterable[Counts]) -> Counts:
    """Return what one hash holds, of what each of the nodes says of it."""
    return together(nodes, {field: HOW.get(field, ">") for field in FIELDS})


def together(parts: Iterable[Counts], how: Mapping[str, str]) -> Counts:
    """Return *parts* as one, each field as *how* says; else added up."""
    numbers: dict[str, int] = {}
    examples: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, value in part.numbers.items():
            old, sign = numbers.get(name), how.get(name, "+")
            if old is None:
                numbers[name] = value
            else:
                numbers[name] = {"+": old + value, ">": max(old, value), "<": min(old, value)}[sign]
        for name, record in part.examples.items():
            if number(record.get("at")) >= number(examples.get(name, {}).get("at")):
                examples[name] = record
    return Counts(numbers, examples)


# --- a task over some hours ----------------------------------------------------------------


@dataclass(frozen=True)
class TaskTally:
    """
    What one task did over some hours.

    Attributes:
        ran: How many of its executions ran.
        ran_reported: How many of these ran in report mode.
        refused: Cause -> how many were refused.
        reported: Cause -> how many would have been refused, and were not.
        holds: How long its locks were held.
        examples: Cause -> the newest record of it, as in the journal.
        first, last: When it was first and last heard of [s, Unix time].
    """

    ran: int = 0
    ran_reported: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    reported: Mapping[str, int] = field(default_factory=dict)
    holds: Holds = field(default_factory=Holds)
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    first: float = 0.0
    last: float = 0.0

    @classmethod
    def of(cls, hours: Sequence[Counts]) -> TaskTally:
        """Return what the task did in *hours*, the oldest first."""
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


@dataclass(frozen=True)
class Tallies:
    """
    What all tasks did over some hours.

    Attributes:
        tasks: Task name -> what it did; who ran most often comes first.
        silent: Labels of the nodes that did not answer.
    """

    tasks: Mapping[str, TaskTally] = field(default_factory=dict)
    silent: Sequence[str] = ()

    @property
    def first(self) -> float:
        """When anything was first counted [s, Unix time]; 0.0 if nothing was."""
        return min((it.first for it in self.tasks.values()), default=0.0)

    @property
    def last(self) -> float:
        """When anything was last counted [s, Unix time]; likewise."""
        return max((it.last for it in self.tasks.values()), default=0.0)


# --- reading -------------------------------------------------------------------------------

#: Hour -> task -> what it did.
Hours = Mapping[int, Mapping[str, Counts]]


class TallyReader:
    """
    Reads the tallies of all nodes as one, on connections of its own.

    Args:
        nodes: As the setting ``redlock_nodes``.
        rules: As all clients have them.
    """

    def __init__(self, nodes: Sequence[Any], rules: Rules) -> None:
        self._addresses = addresses_of(nodes)
        self._prefix = rules.prefix
        self._over: dict[int, Mapping[str, Counts]] = {}

    def read(self, since: float, now: float) -> Tallies:
        """
        Return what tasks did, in whole hours.

        Args:
            since: In the hour of this moment and later [s, Unix time]; at most `RETENTION` ago.
            now: Until then, likewise.
        """
        newest = int(now // HOUR)
        hours = range(int(max(since, now - RETENTION) // HOUR), newest + 1)
        wanted = [hour for hour in hours if hour not in self._over]
        found, silent = self._ask(wanted)
        if not silent:  # a process may still add to the hour before this one
            self._over |= {hour: found[hour] for hour in wanted if hour < newest - 1}
        parts: dict[str, list[Counts]] = {}
        for hour in hours:
            for task, counts in (found.get(hour) or self._over.get(hour) or {}).items():
                parts.setdefault(task, []).append(counts)
        tasks = {task: TaskTally.of(counts) for task, counts in parts.items()}
        return Tallies(dict(sorted(tasks.items(), key=lambda it: (-it[1].ran, it[0]))), silent)

    def _ask(self, hours: Sequence[int]) -> tuple[Hours, list[str]]:
        """Return what all nodes say of *hours*, and the labels of those that did not answer."""

        def ask(address: Address) -> Hours | None:
            try:
                with connected(address) as connection:
                    return hours_on(connection, self._prefix, hours)
            except (RedisError, OSError):
                return None

        answers = ask_all(self._addresses, ask)
        told = [answer for answer in answers if answer is not None]
        silent = [a.label for a, it in zip(self._addresses, answers, strict=True) if it is None]
        return {hour: of_all([node[hour] for node in told]) for hour in hours}, silent


def of_all(nodes: Sequence[Mapping[str, Counts]]) -> dict[str, Counts]:
    """Return what each task did in one hour, of what each node says."""
    tasks = dict.fromkeys(task for node in nodes for task in node)
    return {task: largest(node[task] for node in nodes if task in node) for task in tasks}


def hours_on(connection: AbstractConnection, prefix: str, hours: Sequence[int]) -> Hours:
    """Return what one node says of *hours*."""
    last = b"%d" % (TASKS - 1)
    listed = answers(connection, [(b"ZRANGE", hour_key(prefix, it), b"0", last) for it in hours])
    names = [
        (hour, task)
        for hour, members in zip(hours, listed, strict=True)
        for task in filter(None, map(name_in, members or ()))
    ]
    found: dict[int, dict[str, Counts]] = {hour: {} for hour in hours}
    fields = [field.encode() for field in (*FIELDS, *EXAMPLES)]
    left = iter(names)
    while page := list(islice(left, PAGE)):
        asked = [(b"HMGET", tally_key(prefix, *it), *fields) for it in page]
        for (hour, task), reply in zip(page, answers(connection, asked), strict=True):
            counts = read_counts(reply) if reply else Counts({}, {})
            if counts.numbers:
                found[hour][task] = counts
    return found


def answers(connection: AbstractConnection, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the replies to *commands*; None where a key is none of ours."""
    if not commands:
        return []
    connection.send_packed_command(connection.pack_commands(commands))
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(connection.read_response(disable_decoding=True))
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            replies.append(None)
    return replies


def name_in(member: Any) -> str:
    """Return the name of a task in a node's list; "" if it is no text."""
    return member.decode(errors="ignore") if isinstance(member, bytes) else ""
