"""
Facts of the lock nodes, gathered on connections of the doctor's own.

It writes to a key with a random name, to see what it may do, and deletes it again; and it does what
any client does that meets a restarted node: it puts it into quarantine. Else it only reads, and
goes through the keys page by page.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError, ResponseError

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.nodes.address import Address, addresses_of
from celery_redlock.lock.nodes.guard import Unfit, check_fit, exchange, read_as, read_info
from celery_redlock.lock.nodes.urls import is_database
from celery_redlock.lock.records import channel, probe_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.scripting import Script, read_release
from celery_redlock.lock.scripts.scripts import ENROL
from celery_redlock.ops.doctor.facts import NodeFacts
from celery_redlock.ops.text import one_line
from celery_redlock.reading.journal import journal_key
from celery_redlock.reading.leaks import leaked_pages
from celery_redlock.reading.nodes import (
    ask_all,
    connected,
    enrolment,
    write_of,
)
from celery_redlock.reading.several_servers import several_servers

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["gather_nodes"]

#: How often a node is asked for its clock, and as often how long that takes.
SAMPLES = 9
#: How long further servers are looked for under the names of nodes [s].
LONGEST_LOOK = 5.0
#: How many keys without an expiry are named.
NAMED = 5
#: Of the configuration, what findings are made of.
CONFIG = ("appendonly", "appendfsync", "save")
#: What is needed to wake those who wait, and nothing else.
TO_WAKE = ("HGETALL", "HLEN", "PUBLISH", "ZADD", "ZRANGE", "ZREM")
#: How a node says that this user must not do something.
DENIED = re.compile("noperm|no permission|user executing the script", re.IGNORECASE)

# KEYS 1 text 2 hash 3 another hash 4 stream, all with a name that nobody else has ; ARGV 1 channel
# Answers what failed, as 'COMMAND message'. No key without an expiry may be left behind.
ALLOWED_LUA = """
local failed = {}
local function try(...)
  local reply = redis.pcall(...)
  local fails = type(reply) == 'table' and reply.err
  if fails then failed[#failed + 1] = select(1, ...) .. ' ' .. reply.err end
  return not fails
end
try('TIME')
try('SET', KEYS[1], '1', 'PX', '1000')
try('GET', KEYS[1])
try('MGET', KEYS[1], KEYS[2])
try('PTTL', KEYS[1])
try('EXISTS', KEYS[1])
local can_end = try('PEXPIRE', KEYS[1], '1000')
can_end = try('DEL', KEYS[1]) and can_end
if can_end then
  try('HSET', KEYS[2], 'a', '1', 'b', '2')
  try('PEXPIRE', KEYS[2], '1000')
  try('HGET', KEYS[2], 'a')
  try('HMGET', KEYS[2], 'a')
  try('HGETALL', KEYS[2])
  try('HLEN', KEYS[2])
  try('HDEL', KEYS[2], 'a')
  try('RENAME', KEYS[2], KEYS[3])
  try('XADD', KEYS[4], 'NOMKSTREAM', '*', 'e', '1')
  redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
  try('ZADD', KEYS[1], '1', 'a')
  try('ZRANGE', KEYS[1], '0', '0')
  try('ZREM', KEYS[1], 'a')
  redis.call('DEL', KEYS[1])
end
try('PUBLISH', ARGV[1], '')
return failed
"""
ALLOWED = Script(ALLOWED_LUA, read_release, guarded=False)


def gather_nodes(
    nodes: Sequence[Any], rules: Rules, tell: Callable[[int], None]
) -> list[NodeFacts]:
    """
    Return the facts of each of *nodes*, in their order; all are asked at once.

    *tell* is called from time to time with how many keys have been looked at on one of them.
    """
    addresses = addresses_of(nodes, rules.prefix)
    fingerprint = rules.fingerprint(address.label for address in addresses)

    def ask(address: Address) -> NodeFacts:
        try:
            with connected(address) as connection:
                visit = Visit(connection, rules, tell)
                found = read_as("facts", visit.facts, fingerprint)
                visit.try_to_listen()  # last: who listens can ask nothing else
            found["denied_to_wake"] = list(dict.fromkeys(visit.denied_to_wake))
            return NodeFacts(node=address.label, **found)
        except (RedisError, OSError, ConfigurationError) as error:
            problem = one_line(error) or type(error).__name__
            unfit = isinstance(error, ConfigurationError)
            return NodeFacts(node=address.label, problem=problem, unfit=unfit)

    facts = ask_all(addresses, ask)
    several = several_servers(addresses, LONGEST_LOOK)
    return [
        replace(node, servers=several.get(node.node, ()), in_database=is_database(url))
        for node, url in zip(facts, nodes, strict=True)
    ]


@dataclass
class Visit:
    """
    One node, asked one thing after the other.

    The lists are as in `NodeFacts`; a command may be there repeatedly.
    """

    connection: AbstractConnection
    rules: Rules
    tell: Callable[[int], None]
    denied: list[str] = field(default_factory=list)
    denied_to_wake: list[str] = field(default_factory=list)
    denied_to_tools: list[str] = field(default_factory=list)

    def facts(self, fingerprint: str) -> dict[str, Any]:
        info = read_info(self.ask(self.denied, "INFO") or b"")
        in_cluster = getattr(self.connection, "in_cluster", False)
        found: dict[str, Any] = {"info": info, "in_cluster": in_cluster, **self.clock()}
        with contextlib.suppress(Unfit):
            check_fit(info, in_cluster=in_cluster)
            found["config"] = self.config()
            found["refuses_writes"] = self.why_no_writes()
            if self.try_commands():
                if not self.denied:
                    found |= self.enrolment(info["run_id"], fingerprint)
                found |= self.leaks()
        found["denied"] = list(dict.fromkeys(self.denied))
        found["denied_to_tools"] = list(dict.fromkeys(self.denied_to_tools))
        return found

    def ask(self, denied: list[str], *command: Any) -> Any:
        """Return the reply; None, and a record in *denied*, if this user must not ask that."""
        try:
            return exchange(self.connection, command)[0]
        except ResponseError as error:
            if DENIED.search(str(error)):
                denied.append(str(command[0]))
            return None

    def clock(self) -> dict[str, Any]:
        """Return how long small requests take, and how far the clock is ahead of ours [s]."""
        samples = []
        for _ in range(SAMPLES):
            begun, wall = time.perf_counter(), time.time()
            reply = self.ask(self.denied_to_tools, "TIME")
            took = time.perf_counter() - begun
            if reply is None:
                return {"latencies": [took]}
            node_now = int(reply[0]) + int(reply[1]) / 1e6
            samples.append((took, node_now - (wall + took / 2)))
        return {"latencies": [took for took, _ in samples], "clock_offset": min(samples)[1]}

    def config(self) -> dict[str, str] | None:
        config = {}
        for name in CONFIG:
            reply = self.ask([], "CONFIG", "GET", name)
            if not reply:
                return None
            config[name] = reply[1].decode(errors="replace")
        return config

    def why_no_writes(self) -> str:
        """Return what the node says to a write; "" if it takes it, or if this user must not."""
        try:
            exchange(self.connection, write_of(self.rules))
        except ResponseError as error:
            return "" if DENIED.search(str(error)) else one_line(f"takes no writes: {error}")
        self.ask([], "DEL", probe_key(self.rules.prefix))
        return ""

    def try_commands(self) -> bool:
        """Try all commands; return whether scripts can be loaded."""
        journal = journal_key(self.rules.prefix).decode()
        self.ask(self.denied_to_tools, "XREVRANGE", journal, "+", "-", "COUNT", "1")
        self.ask(self.denied_to_tools, "XRANGE", journal, "-", "+", "COUNT", "1")
        self.ask(self.denied_to_tools, "PING")
        self.ask(self.denied, "EVAL", "return 1", 0)
        for script in (ENROL, ALLOWED):
            if self.ask(self.denied, "SCRIPT", "LOAD", script.source) is None:
                return False
        name = f"doctor:{secrets.token_hex(4)}"
        keys = [f"{self.rules.prefix}:{part}:{name}" for part in ("lock", "queued", "next")]
        keys.append(f"{journal}:{name}")
        to_nobody = channel(self.rules.prefix, name)
        failed = self.ask(self.denied, "EVALSHA", ALLOWED.sha, len(keys), *keys, to_nobody)
        for line in failed or ():
            command, _, why = line.decode(errors="replace").partition(" ")
            if DENIED.search(why):
                (self.denied_to_wake if command in TO_WAKE else self.denied).append(command)
        return True

    def try_to_listen(self) -> None:
        self.ask(self.denied_to_wake, "SUBSCRIBE", channel(self.rules.prefix, "doctor"))

    def enrolment(self, run_id: str, fingerprint: str) -> dict[str, Any]:
        try:
            state, left = enrolment(self.connection, self.rules, run_id, fingerprint)
        except Unfit:
            return {"state": "foreign"}
        except ResponseError:  # out of memory, for example, which another finding tells
            return {}
        return {"state": state, "quarantine": left}

    def leaks(self) -> dict[str, Any]:
        def ask(command: str, *arguments: Any) -> Any:
            # That PTTL is forbidden was found before; EVAL need not be.
            denied = self.denied_to_tools if command == "SCAN" else []
            return self.ask(denied, command, *arguments)

        count, names, seen = 0, list[str](), 0
        for _, looked_at, leaked in leaked_pages(ask, self.rules.prefix):
            count += len(leaked)
            few = leaked[: NAMED - len(names)]
            names += [one_line(key.decode(errors="replace")) for key in few]
            seen += looked_at
            self.tell(seen)
        return {"leaked": count, "leaked_names": names}
