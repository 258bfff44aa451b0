"""Findings about single nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from celery_redlock.lock.nodes.guard import whole_in
from celery_redlock.ops.doctor import ERROR, NOTE, WARNING, Finding
from celery_redlock.ops.doctor.check_votes import (
    no_permission,
    no_permission_for_tools,
    no_permission_to_wake,
    node_down,
    node_foreign,
    node_quarantined,
    node_takes_no_writes,
    node_unmarked,
    several_servers,
    unfit,
)
from celery_redlock.ops.doctor.facts import (
    Facts,
    NodeFacts,
    OtherServer,
    database_of,
    place_of,
)
from celery_redlock.words import redlock_command

__all__ = ["check_nodes", "clock_offset", "node_slow"]

#: Share of the node timeout that a typical request may take [1].
SLOW = 0.5
#: Share of its memory that a node may have used [1].
NEARLY_FULL, FULL = 0.8, 0.95
#: How far clocks may be apart before it is said [s]; half of what is harmful if that is less.
CLOCK_APART = 1.0


def check_nodes(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes:
        if not node.in_database:
            yield from node_down(node) if node.problem else check_node(facts, node)


def check_node(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    why_unfit = list(unfit(facts, node))
    yield from why_unfit
    yield from several_servers(node)
    yield from no_permission(node)
    yield from no_permission_to_wake(node, facts.settings.rules.prefix)
    yield from no_permission_for_tools(node)
    yield from node_takes_no_writes(node)
    yield from node_slow(facts, node)
    yield from clock_offset(facts, node)
    yield from shared_server(facts, node)
    yield from cache_on_node(facts, node)
    if any(finding.code in ("node-replica", "node-cluster") for finding in why_unfit):
        return
    if all(finding.level != ERROR for finding in why_unfit):  # nobody enrols one that is unfit
        yield from node_foreign(facts, node)
        yield from node_unmarked(facts, node)
        yield from node_quarantined(node)
    yield from leaked_keys(node)
    if facts.settings.rules.restart_guard:
        if not facts.settings.is_fallback:  # a server with other work has its own reasons
            yield from snapshots(node)
    else:
        yield from persistence_unknown(node)
        yield from restart_forgets(node)
    yield from memory_nearly_full(node)
    yield from replicas(facts, node)


def leaked_keys(node: NodeFacts) -> Iterator[Finding]:
    """Yield keys that nobody of ours can have written like that."""
    if not node.leaked:
        return
    more = ", ..." if node.leaked > len(node.leaked_names) else ""
    what = (
        f"{node.leaked} of our keys never expire: {', '.join(node.leaked_names)}{more}. We write "
        "none without an expiry: PERSIST, a restored dump or another program did. A lock of that "
        "kind is held forever."
    )
    fix = (
        f"For a lock: '{redlock_command('ls')}' shows its token, 'redlock release' releases it. "
        "Others: DEL, or PEXPIRE with redlock_max_ttl."
    )
    yield Finding(ERROR, "leaked-keys", node.node, what, fix)


def snapshots(node: NodeFacts) -> Iterator[Finding]:
    """
    Yield that a node writes snapshots, which locks do not need.

    After a restart the guard keeps it from voting until no lock that it may have forgotten can be
    held.
    """
    config = node.config or {}
    if config.get("save") and config.get("appendonly") != "yes":
        what = (
            f"It writes snapshots (save {config['save']!r}). With the restart guard they are "
            "of no use to locks: after a restart the node does not vote for a while anyway."
        )
        fix = "If the server is for locks alone: save '' saves forks and disk writes."
        yield Finding(NOTE, "snapshots", node.node, what, fix)


def persistence_unknown(node: NodeFacts) -> Iterator[Finding]:
    """Yield that nobody knows whether a node without restart guard keeps its data."""
    if node.config is None:
        what = "redlock_restart_guard is off, and whether the node keeps its data is unknown."
        fix = "Make sure of appendonly yes and appendfsync always, or turn the guard on."
        yield Finding(WARNING, "persistence-unknown", node.node, what, fix)


def restart_forgets(node: NodeFacts) -> Iterator[Finding]:
    """Yield that a node without restart guard may forget locks when it is restarted."""
    if node.config is None:
        return
    appendonly, appendfsync = node.config.get("appendonly"), node.config.get("appendfsync")
    if (appendonly, appendfsync) != ("yes", "always"):
        what = (
            "redlock_restart_guard is off, and the node does not have every write on disk before "
            f"it answers (appendonly {appendonly}, appendfsync {appendfsync}). After a restart it "
            "may grant locks that are held."
        )
        fix = "Turn redlock_restart_guard on, or set appendonly yes and appendfsync always."
        yield Finding(ERROR, "restart-forgets", node.node, what, fix)


def memory_nearly_full(node: NodeFacts) -> Iterator[Finding]:
    """Yield that the node is about to refuse writes."""
    used, most = whole_in(node.info, "used_memory"), whole_in(node.info, "maxmemory")
    if not most or used < NEARLY_FULL * most:
        return
    level = ERROR if used >= FULL * most else WARNING
    what = f"It has used {used / most:.0%} of its maxmemory; when that is full it grants no lock."
    fix = "Raise maxmemory, or find out what else is kept on it."
    yield Finding(level, "memory-nearly-full", node.node, what, fix)


def replicas(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    """Yield that a failover is possible."""
    count = whole_in(node.info, "connected_slaves")
    if not count:
        return
    guarded = facts.settings.rules.restart_guard
    what = f"{count} replica(s) copy from it. One that takes its place may lack the newest locks. "
    what += (
        "The restart guard then keeps it from voting for a while, so this is safe."
        if guarded
        else "redlock_restart_guard is off, so it would give away locks that are held."
    )
    fix = (
        "Locks need no replicas. Never make a lock node one (REPLICAOF), not even briefly."
        if guarded
        else "Turn redlock_restart_guard on."
    )
    if node.in_cluster and guarded:
        what = what.partition(" The restart guard")[0] + failover_of_cluster(facts)
        fix = "Nothing: a cluster has replicas. Several nodes go on when one of them fails."
    yield Finding(NOTE if guarded else ERROR, "replicas", node.node, what, fix)


def failover_of_cluster(facts: Facts) -> str:
    return (
        " So after a failover held locks are lost, and none is granted for "
        f"{facts.settings.rules.quarantine:.0f} s (redlock_max_ttl): nobody runs twice."
    )


def node_slow(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    """Yield that votes of the node come too late, or are about to."""
    limit = facts.settings.rules.node_timeout
    if node.latency < SLOW * limit:
        return
    level = ERROR if node.latency >= limit else WARNING
    what = (
        f"A small request takes {node.latency * 1000:.1f} ms; after redlock_node_timeout "
        f"({limit * 1000:.0f} ms) its vote is not waited for."
    )
    fix = "Raise redlock_node_timeout to several times that, or take a node that is nearer."
    yield Finding(level, "node-slow", node.node, what, fix)


def clock_offset(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    """
    Yield that the node's clock and ours are apart.

    Leases do not depend on that. Fencing numbers and slots do: a node refuses those of a client
    whose clock is too far ahead.
    """
    rules, ahead = facts.settings.rules, node.clock_offset
    if ahead is None:
        return
    off, words = abs(ahead), "ahead of" if ahead > 0 else "behind"
    what = f"Its clock is {off:.1f} s {words} the clock here."
    fix = "Run NTP or chrony on the nodes and on every machine with workers or beat."
    if -ahead > rules.longest_skew and rules.fence:
        what += f" More than {rules.longest_skew:.1f} s behind, it refuses our fencing numbers."
        yield Finding(ERROR, "clock-offset", node.node, what, fix)
    elif off > min(CLOCK_APART, rules.longest_skew / 2):
        yield Finding(WARNING, "clock-offset", node.node, what, fix)


def shared_server(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    """Yield that the node has another job in this app."""
    if len(facts.nodes) == 1:
        return  # as whoever has one server has it
    roles = [server.role for server in facts.others if is_same(server, node)]
    if roles:
        what = (
            f"It is also the app's {' and '.join(roles)}: a backlog there fills its memory, a slow "
            "command there makes it late here, and both fail together."
        )
        fix = "Give the locks servers of their own; small ones will do."
        yield Finding(WARNING, "shared-server", node.node, what, fix)


def cache_on_node(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    """Yield that the node's database is flushed whenever a cache is cleared."""
    for cache in facts.caches:
        if is_same(cache, node) and cache.database == database_of(node.node):
            what = (
                f"Its database is that of {cache.role}: cache.clear() flushes it (FLUSHDB), so "
                "that locks that are held are lost, and none is granted for "
                f"{facts.settings.rules.quarantine:.0f} s."
            )
            fix = "Give the cache, or the locks, another database of this server."
            yield Finding(WARNING, "cache-on-node", node.node, what, fix)


def is_same(server: OtherServer, node: NodeFacts) -> bool:
    run_id = node.info.get("run_id", "")
    if server.run_id and run_id:
        return server.run_id == run_id
    return server.place == place_of(node.node)
