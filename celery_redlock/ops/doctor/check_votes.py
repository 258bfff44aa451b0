"""Findings about a node that does not or must not vote. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from celery_redlock.lock.nodes.guard import is_of_cluster, policy_that_evicts, whole_in
from celery_redlock.lock.records import Keys
from celery_redlock.ops.doctor import ERROR, NOTE, WARNING, Finding
from celery_redlock.ops.doctor.facts import Facts, NodeFacts, place_of
from celery_redlock.words import counted, redlock_command

__all__ = [
    "no_permission",
    "no_permission_for_tools",
    "no_permission_to_wake",
    "node_down",
    "node_foreign",
    "node_quarantined",
    "node_takes_no_writes",
    "node_unmarked",
    "several_servers",
    "unfit",
]

#: What a node says or shows that cannot be asked -> what it is, and what to do about it.
SILENCE = [
    (re.compile(pattern, re.IGNORECASE), what, fix)
    for pattern, what, fix in (
        (
            "wrongpass|noauth|password|authentication",
            "It does not let us in",
            "Check redlock_username and redlock_password, or the login in its URL.",
        ),
        (
            "certificate|ssl|tls",
            "No secure connection can be made",
            "Check its certificate, and the ssl_ options in its URL.",
        ),
        (
            "name or service|name resolution|nodename|getaddrinfo|unknown host",
            "Its name is not known",
            "Check its host name, and the DNS of this machine.",
        ),
        (
            "max number of clients",
            "It takes no more connections",
            "Raise its maxclients, or find out who keeps so many: CLIENT LIST.",
        ),
        ("loading", "It reads its data", "Wait until it has started."),
        (
            "index is out of range",
            "It has no database of this number",
            "Write another in its URL, like /0, or raise databases in its configuration.",
        ),
        (
            "protected mode|denied redis",
            "It answers its own machine only",
            "Set a password and bind, as its message says.",
        ),
    )
]
#: What helps against a replica.
NAME_MASTER = "Name the master, or a Sentinel service."
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
        ("READONLY|read only replica", NAME_MASTER),
    )
]


def node_down(node: NodeFacts) -> Iterator[Finding]:
    """Yield that a node does not answer."""
    what, fix = "It does not answer", "Start it, or check the network path to it."
    for pattern, meaning, remedy in SILENCE:
        if pattern.search(node.problem):
            what, fix = meaning, remedy
            break
    yield Finding(WARNING, "node-down", node.node, f"{what}: {node.problem}", fix)


# --- servers that must not be a lock node --------------------------------------------------


def unfit(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    if "INFO" in node.denied:
        return
    if "role" not in node.info or "run_id" not in node.info:
        yield from node_unknown(node)
    else:
        yield from node_replica(node)
        yield from node_cluster(node)
        yield from node_eviction(facts, node)


def node_unknown(node: NodeFacts) -> Iterator[Finding]:
    """Yield that a node is no Redis or Valkey server."""
    what = "It answers, but not as a Redis or Valkey server does."
    yield Finding(ERROR, "node-unknown", node.node, what, "Name a Redis or Valkey server.")


def node_replica(node: NodeFacts) -> Iterator[Finding]:
    """Yield that a node is a replica."""
    if node.info["role"] != "master":
        what = f"It is a {node.info['role']}: it has what its master has, and takes no lock."
        yield Finding(ERROR, "node-replica", node.node, what, NAME_MASTER)


def node_cluster(node: NodeFacts) -> Iterator[Finding]:
    """Yield that a node's URL names a cluster where there is none, or the reverse."""
    if is_of_cluster(node.info) == node.in_cluster:
        return
    what = "It runs in cluster mode, and is named as a server by itself; a cluster is one node."
    fix = (
        f"Write redis+cluster://{place_of(node.node)}/ in redlock_nodes (rediss+cluster:// with "
        "TLS), or take servers with cluster-enabled no."
    )
    if node.in_cluster:
        what = "It is named as a cluster, and does not run in cluster mode."
        fix = "Write its URL with redis:// in redlock_nodes (rediss:// with TLS)."
    yield Finding(ERROR, "node-cluster", node.node, what, fix)


def node_eviction(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    """Yield that a node evicts keys when its memory is full; the only one votes all the same."""
    policy = policy_that_evicts(node.info)
    if not policy:
        return
    what = f"It may evict locks when its memory is full (maxmemory-policy {policy})."
    fix = "CONFIG SET maxmemory-policy noeviction, and the same in its configuration file."
    if len(facts.nodes) > 1:
        yield Finding(ERROR, "node-eviction", node.node, what, fix)
        return
    count = whole_in(node.info, "evicted_keys")
    what += (
        f" Since its start it has evicted {counted(count, 'key')}. Whenever there are more, locks "
        f"that are held are lost, and none is granted for {facts.settings.rules.quarantine:.0f} s."
    )
    if policy == "volatile-ttl":
        what += " This policy evicts what expires soonest first, as locks do."
    fix += " Or keep the locks on a server that evicts nothing."
    yield Finding(WARNING, "node-eviction", node.node, what, fix)


def several_servers(node: NodeFacts) -> Iterator[Finding]:
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


# --- what this user may do -----------------------------------------------------------------


def no_permission(node: NodeFacts) -> Iterator[Finding]:
    """Yield that this user must not run what every worker needs."""
    if node.denied:
        what = f"This user must not run {', '.join(node.denied)}, which every worker needs."
        fix = "Allow these commands, on all keys that begin with redlock_prefix (ACL SETUSER)."
        yield Finding(ERROR, "no-permission", node.node, what, fix)


def no_permission_to_wake(node: NodeFacts, prefix: str) -> Iterator[Finding]:
    """Yield that this user must not send or receive hints."""
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


def no_permission_for_tools(node: NodeFacts) -> Iterator[Finding]:
    """Yield that this user must not run what an operator's tools need."""
    if node.denied_to_tools:
        what = (
            f"This user must not run {', '.join(node.denied_to_tools)}: workers do not need them, "
            "but some of the operator's tools see less without them."
        )
        fix = "Allow these commands to the user of the operator's tools (ACL SETUSER)."
        yield Finding(NOTE, "no-permission-for-tools", node.node, what, fix)


def node_takes_no_writes(node: NodeFacts) -> Iterator[Finding]:
    """Yield that a node takes no writes."""
    if node.refuses_writes:
        known = (fix for pattern, fix in REFUSED_WRITES if pattern.search(node.refuses_writes))
        said = node.refuses_writes.rstrip(".")
        what = f"It {said}. It grants, renews and releases no lock meanwhile."
        fix = next(known, "Do what the server says, or look into its log.")
        yield Finding(ERROR, "node-takes-no-writes", node.node, what, fix)


# --- its enrolment -------------------------------------------------------------------------


def node_foreign(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    """Yield that a node is enrolled by clients with other settings."""
    if node.state != "foreign":
        return
    what = (
        "It is enrolled by clients with other lock nodes or another redlock_max_ttl. While "
        "it is, no node that is new or was restarted gets to vote."
    )
    fix = f"Make them equal everywhere; after a wanted change: {bootstrap()}."
    if any(other.state == "enrolled" for other in facts.nodes):
        rules = facts.settings.rules
        boot = Keys.of(rules.prefix, "").boot.decode()
        fix = (
            "Have those clients name the same, or another server. Then, as others are enrolled "
            f"for yours, DEL {boot} on this node alone: it votes {rules.quarantine:.0f} s later, "
            "and no lock is lost."
        )
    yield Finding(ERROR, "node-foreign", node.node, what, fix)


def node_unmarked(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    """Yield that a node is new, or has lost its memory, and no client has noticed it."""
    if node.state != "unmarked":
        return
    what = (
        "It does not vote: it is new, or has lost its memory and nobody has noticed. It votes "
        f"at most {facts.settings.rules.quarantine:.0f} s after the first client finds it."
    )
    fix = f"For a new node: {bootstrap()}."
    if any(other.state == "foreign" for other in facts.nodes):
        what = "It does not vote, and is not enrolled while another node is other clients'."
        fix = "See node-foreign."
    yield Finding(WARNING, "node-unmarked", node.node, what, fix)


def node_quarantined(node: NodeFacts) -> Iterator[Finding]:
    """Yield that a node does not vote for a time, as it is new or was restarted."""
    if node.state == "enrolled" and node.quarantine:
        what = (
            "It is new, or was restarted or flushed, or has evicted keys, and does not vote for "
            f"another {node.quarantine:.0f} s."
        )
        fix = f"Wait, or for new nodes: {bootstrap()}. If it is restarted often, find out why."
        yield Finding(WARNING, "node-quarantined", node.node, what, fix)


def bootstrap() -> str:
    """Return what makes a new node vote at once, and when it may be said."""
    return f"'{redlock_command('bootstrap')}' while no lock is held"
