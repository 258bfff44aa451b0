"""
The lock nodes as this process sees them, over the connections that its locks are taken on.

`celery_redlock.reading.nodes` connects by itself; this module says which nodes this process can
lock on, and how near they are.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.nodes.address import UrlAddress
from celery_redlock.lock.scripts.requests import probe_request
from celery_redlock.lock.scripts.votes import Vote, VoteKind
from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.reading.several_servers import SEVERAL, several_servers
from celery_redlock.words import counted, duration

if TYPE_CHECKING:
    from celery_redlock.lock.nodes.node import Node
    from celery_redlock.lock.redlock import Redlock

__all__ = ["check", "connect", "probe", "risks"]

#: How long `check` waits for nodes that are being connected [s].
LONGEST_CONNECT = 5.0
#: How long it looks for further servers under the names of nodes [s].
LONGEST_LOOK = 2.0


def connect(locks: Redlock, longest: float) -> None:
    """Wait until every node is connected or has failed to be, at most *longest* [s]."""
    locks.fanout.settle_all(longest)


def probe(locks: Redlock) -> list[NodeStatus]:
    """Ask all nodes how they are, and wait for each no longer than a round."""
    ballot = locks.driver.ask(Ask(probe_request(locks.rules), lambda _: False))
    return [
        status(node, vote)
        for node, vote in zip(locks.fanout.nodes, ballot, strict=True)
        if vote is not None
    ]


def check(locks: Redlock) -> dict[str, str]:
    """
    Connect to all nodes and return those that do not answer, label -> why.

    Raises:
        ConfigurationError: A server must not be a lock node (a replica, a cluster node,
            one of several that evicts keys, one named twice, one enrolled for other settings, two
            under one name).
    """
    connect(locks, LONGEST_CONNECT)
    locks.fanout.publish()
    problems = {
        node.label: node.problem or "no answer in time"
        for node in locks.fanout.nodes
        if is_silent(node)
    }
    for label, problem in problems.items():
        if isinstance(problem, ConfigurationError):
            msg = str(problem)
            raise ConfigurationError(msg if label in msg else f"lock node {label} {msg}")
    there = [node.address for node in locks.fanout.nodes if node.label not in problems]
    for label, places in several_servers(there, LONGEST_LOOK).items():
        msg = f"lock node {label} {SEVERAL.format(', '.join(places))}"
        raise ConfigurationError(msg)
    return {label: str(problem) for label, problem in problems.items()}


def risks(locks: Redlock, caches: Mapping[str, str]) -> Iterator[str]:
    """Yield what may make connected nodes forget locks; *caches*: label of a database -> whose."""
    for node in locks.fanout.nodes:
        if node.greeting is None:
            continue
        if node.greeting.replicas and isinstance(node.address, UrlAddress):  # not a Sentinel's
            others = "; the other nodes replace it" if len(locks.labels) > 1 else ""
            yield (
                f"Lock node {node.label} has {counted(node.greeting.replicas, 'replica')}, which "
                f"may lack its latest locks{others}. Never make a lock node a replica (REPLICAOF), "
                "not even briefly: it forgets locks, and does not vote for a while"
            )
        if node.greeting.eviction:
            yield (
                f"Lock node {node.label} may evict locks when its memory is full "
                f"(maxmemory-policy {node.greeting.eviction}). Whenever it has evicted keys, locks "
                f"that are held are lost, and none is granted for "
                f"{duration(locks.rules.quarantine)}; set maxmemory-policy noeviction, or keep "
                "the locks on a server that evicts nothing"
            )
        if node.label in caches:
            yield (
                f"Lock node {node.label} is the database of {caches[node.label]}: cache.clear() "
                "flushes it (FLUSHDB), so that locks that are held are lost, and none is granted "
                f"for {duration(locks.rules.quarantine)}; give the cache a database of its own"
            )


def status(node: Node, vote: Vote) -> NodeStatus:
    states: dict[enum.Enum, str] = {VoteKind.GRANTED: "up", VoteKind.QUARANTINED: "quarantined"}
    state = states.get(vote.kind, "down" if is_silent(node) else "unfit")
    is_counted = state in states.values()
    return NodeStatus(
        node.label,
        state,
        quarantine=vote.ttl,
        problem="" if state == "up" else vote.in_words(),
        latency=node.latency if is_counted else None,
        clock_offset=node.clock_offset if is_counted else None,
        eviction=node.greeting.eviction if node.greeting else "",
    )


def is_silent(node: Node) -> bool:
    """Return whether *node* is not connected, or owes an answer for too long."""
    return node.connection is None or node.suspect_since is not None
