"""Findings about single nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from celery_redlock.lock.nodes.guard import whole_in
from celery_redlock.lock.records import Keys
from celery_redlock.ops.doctor import ERROR, NOTE, WARNING, Finding
from celery_redlock.ops.doctor.facts import Facts, NodeFacts, OtherServer, place_of
from celery_redlock.words import redlock_command

__all__ = ["check_nodes"]

#: Share of the node timeout that a typical request may take [1].
SLOW = 0.5
#: Share of its memory that a node may have used [1].
NEARLY_FULL, FULL = 0.8, 0.95
#: What a node says or shows that cannot be asked -> what it is, and what to do about it.
SILENCE = [
    (re.compile(pattern, re.IGNORECASE), what, fix)
    for pattern, what, fix in (
        (
            "wrongpass|noauth|password|authentication",
            "It does not let us in",
            "Check redlock_username and redlock_password, or the login in redlock_nodes.",
        ),
        (
            "certificate|ssl|tls",
            "No secure connection can be made",
            "Check its certificate, and the ssl_ options in redlock_nodes.",
        ),
        (
            "name or service|name resolution|nodename|getaddrinfo|unknown host",
            "Its name is not known",
            "Check its host name in redlock_nodes, and the DNS of this machine.",
        ),
        (
            "max number of clients",
            "It takes no more connections",
            "Raise its maxclients, or find out who keeps so many: CLIENT LIST.",
        ),
        ("loading", "It reads its data", "Wait until it has started."),
        (
            "protected mode|denied redis",
            "It answers its own machine only",
            "Set a password and bind, as its message says.",
        ),
    )
]
#: What a node says to a write -> what to do about it.
REFUSED_WRITES = [
    (re.compile(pattern), fix)
    for pattern, fix in (
        ("MISCONF", "Make room on its disk; for locks alone, save '' needs no snapshots at all."),
        (
            "NOREPLICAS",
            "Start the replica that it waits for, or CONFIG SET min-replicas-to-write 0.",
        ),
        (
            "OOM|used memory > 'maxmemory'",
            "Raise its maxmemory, or find out what else is kept on it.",
        ),
        ("READONLY|read only replica", "Name the master in redlock_nodes, or a Sentinel service."),
    )
]
#: How far clocks may be apart before it is said [s]; half of what is harmful if that is less.
CLOCK_APART = 1.0


def check_nodes(facts: Facts) -> Iterator[Finding]:
    """Yield what is amiss with each node by itself."""
    for node in facts.nodes:
        if node.problem:
            yield Finding(WARNING, "node-down", node.node, *silence(node.problem))
            continue
        unfit = list(fitness(node))
        yield from unfit
        yield from several(node)
        yield from permissions(node, facts.settings.rules.prefix)
        yield from writes(node)
        yield from speed(facts, node)
        yield from clock(facts, node)
        yield from sharing(facts, node)
        if any(finding.code in ("node-replica", "node-cluster") for finding in unfit):
            continue
        if not unfit:  # nobody enrols one that must not be a lock node
            yield from standing(facts, node)
        yield from leaks(node)
        yield from persistence(facts, node)
        yield from memory(node)
        yield from replicas(facts, node)


def fitness(node: NodeFacts) -> Iterator[Finding]:
    """Yield why a server must not be a lock node."""
    info, where = node.info, node.node
    if "INFO" in node.denied:
        return
    if "role" not in info or "run_id" not in info:
        what = "It answers, but not as a Redis or Valkey server does."
        yield Finding(ERROR, "node-unknown", where, what, "Name a Redis or Valkey server.")
        return
    if info["role"] != "master":
        what = f"It is a {info['role']}: it has what its master has, and takes no lock."
        fix = "Name the master in redlock_nodes, or a Sentinel service."
        yield Finding(ERROR, "node-replica", where, what, fix)
    if info.get("cluster_enabled") == "1" or info.get("redis_mode") == "cluster":
        what = "It runs in cluster mode; lock nodes are independent servers."
        fix = "Take servers with cluster-enabled no."
        yield Finding(ERROR, "node-cluster", where, what, fix)
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        what = f"It may throw locks away when its memory is full (maxmemory-policy {policy})."
        fix = "CONFIG SET maxmemory-policy noeviction, and the same in its configuration file."
        yield Finding(ERROR, "node-eviction", where, what, fix)


def several(node: NodeFacts) -> Iterator[Finding]:
    """Yield that a node's name stands for several servers."""
    if node.servers:
        what = (
            f"It is a name of {len(node.servers)} servers ({', '.join(node.servers)}): clients "
            "that reach different ones hold one lock at the same time."
        )
        fix = (
            "Give each server a name of its own; in Kubernetes that of its pod, as a headless "
            "service has those of all."
        )
        yield Finding(ERROR, "several-servers", node.node, what, fix)


def silence(problem: str) -> tuple[str, str]:
    """Return what is amiss with a node that says or shows *problem*, and what to do about it."""
    for pattern, what, fix in SILENCE:
        if pattern.search(problem):
            return f"{what}: {problem}", fix
    return f"It does not answer: {problem}", "Start it, or check the network path to it."


def writes(node: NodeFacts) -> Iterator[Finding]:
    """Yield that a node takes no writes, and so grants nothing."""
    if node.refuses_writes:
        known = (fix for pattern, fix in REFUSED_WRITES if pattern.search(node.refuses_writes))
        said = node.refuses_writes.rstrip(".")
        what = f"It {said}. It grants, renews and releases no lock meanwhile."
        fix = next(known, "Do what the server says, or look into its log.")
        yield Finding(ERROR, "node-takes-no-writes", node.node, what, fix)


def permissions(node: NodeFacts, prefix: str) -> Iterator[Finding]:
    """Yield what this user must not do on the node."""
    if node.denied:
        what = f"This user must not run {', '.join(node.denied)}, which every worker needs."
        fix = "Allow these commands, on all keys that begin with redlock_prefix (ACL SETUSER)."
        yield Finding(ERROR, "no-permission", node.node, what, fix)
    if node.denied_to_wake:
        what = (
            f"This user must not run {', '.join(node.denied_to_wake)}, or not on our channels: "
            "locks work, but nobody who waits for one is woken by this node. Where a majority of "
            "nodes cannot, lock_wait asks again and again, and a task with on_conflict='queue' "
            "comes by itself, a minute later or more."
        )
        fix = (
            f"Allow these commands, and the channels: ACL SETUSER ... &{prefix}:* +publish "
            "+subscribe; docs/how-to/sentinel-tls-acl.md has all of them."
        )
        yield Finding(WARNING, "no-permission-to-wake", node.node, what, fix)
    if node.denied_to_tools:
        what = (
            f"This user must not run {', '.join(node.denied_to_tools)}: workers do not need them, "
            "but some of the operator's tools see less without them."
        )
        fix = "Allow these commands to the user of the operator's tools (ACL SETUSER)."
        yield Finding(NOTE, "no-permission-for-tools", node.node, what, fix)


def bootstrap() -> str:
    """Return what makes a new node vote at once, and when that may be said."""
    return f"'{redlock_command('bootstrap')}' while no lock is held"


def standing(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    """Yield why a node does not vote."""
    if node.state == "foreign":
        what = (
            "It is enrolled by clients with other redlock_nodes or another redlock_max_ttl. While "
            "it is, no node that is new or was restarted gets to vote."
        )
        fix = f"Make them equal everywhere; after a wanted change: {bootstrap()}."
        if any(other.state == "enrolled" for other in facts.nodes):
            boot = Keys.of(facts.settings.rules.prefix, "").boot.decode()
            fix = (
                "Have those clients name the same, or another server. Then, as others are enrolled "
                f"for yours, DEL {boot} on this node alone: it votes "
                f"{facts.settings.rules.quarantine:.0f} s later, and no lock is lost."
            )
        yield Finding(ERROR, "node-foreign", node.node, what, fix)
    elif node.state == "unmarked" and any(it.state == "foreign" for it in facts.nodes):
        what = "It does not vote, and is not enrolled while another node is other clients'."
        yield Finding(WARNING, "node-unmarked", node.node, what, "See node-foreign.")
    elif node.state == "unmarked":
        what = (
            "It does not vote: it is new, or has lost its memory and nobody has noticed. It votes "
            f"at most {facts.settings.rules.quarantine:.0f} s after the first client finds it."
        )
        yield Finding(WARNING, "node-unmarked", node.node, what, f"For a new node: {bootstrap()}.")
    elif node.quarantine:
        what = (
            f"It is new, restarted or wiped, and does not vote for another {node.quarantine:.0f} s."
        )
        fix = f"Wait, or for new nodes: {bootstrap()}. If it is restarted often, find out why."
        yield Finding(WARNING, "node-quarantined", node.node, what, fix)


def leaks(node: NodeFacts) -> Iterator[Finding]:
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


def persistence(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    """
    Yield what the node's way of keeping its data means.

    With the restart guard a node that was restarted does not vote until no lock that it may have
    forgotten can be held: it need not keep anything. Without, it has to have every write on disk
    before it answers.
    """
    config = node.config
    if config is None:
        if not facts.settings.rules.restart_guard:
            what = "redlock_restart_guard is off, and whether the node keeps its data is unknown."
            fix = "Make sure of appendonly yes and appendfsync always, or turn the guard on."
            yield Finding(WARNING, "persistence-unknown", node.node, what, fix)
        return
    keeps_all = config.get("appendonly") == "yes" and config.get("appendfsync") == "always"
    if not facts.settings.rules.restart_guard and not keeps_all:
        what = (
            "redlock_restart_guard is off, and the node does not have every write on disk before "
            f"it answers (appendonly {config.get('appendonly')}, appendfsync "
            f"{config.get('appendfsync')}). After a restart it may grant locks that are held."
        )
        fix = "Turn redlock_restart_guard on, or set appendonly yes and appendfsync always."
        yield Finding(ERROR, "restart-forgets", node.node, what, fix)
    elif config.get("save") and config.get("appendonly") != "yes":
        what = (
            f"It writes snapshots (save {config['save']!r}). With the restart guard they are "
            "of no use to locks: after a restart the node does not vote for a while anyway."
        )
        fix = "If the server is for locks alone: save '' saves forks and disk writes."
        yield Finding(NOTE, "snapshots", node.node, what, fix)


def memory(node: NodeFacts) -> Iterator[Finding]:
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
        "The restart guard then keeps it from voting for a while, so this is safe, but brings "
        "little: the other nodes are what stands in for one that fails."
        if guarded
        else "redlock_restart_guard is off, so it would give away locks that are held."
    )
    fix = (
        "Lock nodes need no replicas. Never make one a replica (REPLICAOF), not even briefly."
        if guarded
        else "Turn redlock_restart_guard on."
    )
    yield Finding(NOTE if guarded else ERROR, "replicas", node.node, what, fix)


def speed(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
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


def clock(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
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


def sharing(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    """Yield that the node has another job in this app."""
    if facts.settings.is_fallback:
        return
    roles = [server.role for server in facts.others if is_same(server, node)]
    if roles:
        what = (
            f"It is also the app's {' and '.join(roles)}: a backlog there fills its memory, a slow "
            "command there makes it late here, and both fail together."
        )
        fix = "Give the locks servers of their own; small ones will do."
        yield Finding(WARNING, "shared-server", node.node, what, fix)


def is_same(server: OtherServer, node: NodeFacts) -> bool:
    """Return whether the two are one process."""
    run_id = node.info.get("run_id", "")
    if server.run_id and run_id:
        return server.run_id == run_id
    return server.place == place_of(node.node)
