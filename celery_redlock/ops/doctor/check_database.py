"""Findings about a database that is the lock node. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from celery_redlock.ops.doctor import ERROR, NOTE, WARNING, Finding
from celery_redlock.ops.doctor.check_nodes import clock_offset, node_slow
from celery_redlock.ops.doctor.check_votes import (
    node_foreign,
    node_quarantined,
    node_takes_no_writes,
    node_unmarked,
)
from celery_redlock.ops.doctor.facts import Facts, NodeFacts

__all__ = ["check_databases"]

#: What a database says that cannot be asked -> what it is, and what to do about it.
SILENCE = [
    (re.compile(pattern, re.IGNORECASE), what, fix)
    for pattern, what, fix in (
        (
            "password|authentication|pg_hba",
            "It does not let us in",
            "Check redlock_password, or its URL, PGPASSWORD, ~/.pgpass or service file.",
        ),
        (
            "certificate|ssl|tls",
            "No secure connection can be made",
            "Check its certificate, and sslmode and sslrootcert in its URL.",
        ),
        (
            "translate host|name resolution|resolve|unknown host",
            "Its name is not known",
            "Check its host name, and the DNS of this machine.",
        ),
        (
            "too many (?:clients|connections)|connection slots",
            "It takes no more connections",
            "Raise its max_connections, or put a pooler before it.",
        ),
        ("starting up|shutting down|recovery", "It starts or ends", "Wait until it has started."),
        ("unable to open|no such file", "Its file cannot be opened", "Check path and rights."),
        ("readonly database", "Its file may not be written", "Check its rights, and its folder's."),
        ("not a database", "Its file is not SQLite's", "Name another one in redlock_nodes."),
        (
            "no space left|disk is full|disk i/o",
            "Its disk is full, or fails",
            "Make room, or look into the log of its machine.",
        ),
        (
            "lock timeout",
            "Others have its tables to themselves",
            "Wait for them, as for a VACUUM FULL or a migration.",
        ),
    )
]


def check_databases(facts: Facts) -> Iterator[Finding]:
    for node in facts.nodes:
        if node.in_database:
            yield from check_database(facts, node)


def check_database(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    if node.problem:
        yield from database_unfit(node) if node.unfit else database_down(node)
        return
    yield from node_takes_no_writes(node)
    yield from node_slow(facts, node)
    yield from clock_offset(facts, node)
    yield from node_foreign(facts, node)
    yield from node_unmarked(facts, node)
    yield from node_quarantined(node)
    yield from keys_left(node)
    yield from commits(facts, node)


def database_unfit(node: NodeFacts) -> Iterator[Finding]:
    """Yield that a database has no tables for locks, or must not be a lock node."""
    yield Finding(ERROR, "database-unfit", node.node, f"It {node.problem}.", "As it says.")


def database_down(node: NodeFacts) -> Iterator[Finding]:
    """Yield that a database does not answer."""
    what, fix = "It does not answer", "Start it, or check the network path to it."
    for pattern, meaning, remedy in SILENCE:
        if pattern.search(node.problem):
            what, fix = meaning, remedy
            break
    yield Finding(WARNING, "database-down", node.node, f"{what}: {node.problem}", fix)


def keys_left(node: NodeFacts) -> Iterator[Finding]:
    """Yield keys that nobody of ours can have written like that."""
    if node.leaked:
        more = ", ..." if node.leaked > len(node.leaked_names) else ""
        what = (
            f"{node.leaked} of our keys never expire: {', '.join(node.leaked_names)}{more}. We "
            "write none without an expiry: another program did. Such a lock is held forever."
        )
        fix = "Delete their rows while no worker runs; for a lock 'redlock release' will do."
        yield Finding(ERROR, "leaked-keys", node.node, what, fix)


def commits(facts: Facts, node: NodeFacts) -> Iterator[Finding]:
    """Yield what a crash of the database may lose, and what that does to locks."""
    kind, is_guarded = node.info.get("redlock_commits"), facts.settings.rules.restart_guard
    away = f"After that none is granted for {facts.settings.rules.quarantine:.0f} s."
    fix = "Nothing, if that is meant."
    if kind == "durable":
        what = (
            "Its commits are durable: a crash or restart forgets no lock. What takes its place (a "
            f"replica, a restored copy) may lack the newest ones. {away}"
        )
        level = NOTE
    elif kind == "async":
        what = f"commit=async: a crash of the database forgets the last locks. {away}"
        level = NOTE
    else:
        what = f"fsync or full_page_writes is off: a crash of its machine loses data. {away}"
        level, fix = WARNING, "Switch both on."
    if not is_guarded and kind != "durable":
        forgets = what.partition(" After")[0]
        what = f"{forgets} redlock_restart_guard is off, so it may give a lock twice."
        level, fix = ERROR, "Turn redlock_restart_guard on."
    yield Finding(level, "database-commits", node.node, what, fix)
