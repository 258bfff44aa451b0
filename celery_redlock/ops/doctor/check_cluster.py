"""Findings about the nodes together, and about the settings. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from celery_redlock.lock.lease import quorum
from celery_redlock.ops.doctor import ERROR, NOTE, WARNING, Finding
from celery_redlock.ops.doctor.facts import Facts
from celery_redlock.words import redlock_command, votes_needed

__all__ = ["check_cluster"]

GROW = "Nothing, while that is enough; docs/how-to/how-many-nodes.md says how to grow."
OF_DATABASE = "Nothing, while that is enough; see docs/how-to/lock-on-your-database.md."


def check_cluster(facts: Facts) -> Iterator[Finding]:
    for where, problem in facts.problems.items():
        yield Finding(ERROR, where, "", problem, "As it says.")
    yield from fallback_node(facts)
    yield from single_node(facts)
    yield from password_in_url(facts)
    yield from same_server(facts)
    yield from no_quorum(facts)
    yield from clock_spread(facts)
    yield from no_hiredis(facts)


def fallback_node(facts: Facts) -> Iterator[Finding]:
    """Yield that locks are kept on the Redis that the app has for something else."""
    if facts.settings.is_fallback:
        whose = "Redis of the result backend or broker"
        if any(node.in_database for node in facts.nodes):
            whose = "database of the result backend"
        what = f"The {whose} keeps the locks, too. While it is away, there are none."
        yield Finding(NOTE, "fallback-node", first_node(facts), what, grow(facts))


def single_node(facts: Facts) -> Iterator[Finding]:
    """Yield that the failure of one server stops all locks."""
    if len(facts.nodes) == 1 and not facts.settings.is_fallback:
        what = "There is one lock node. While it is away, there are no locks."
        yield Finding(NOTE, "single-node", first_node(facts), what, grow(facts))


def grow(facts: Facts) -> str:
    return OF_DATABASE if any(node.in_database for node in facts.nodes) else GROW


def first_node(facts: Facts) -> str:
    return facts.nodes[0].node if facts.nodes else ""


def password_in_url(facts: Facts) -> Iterator[Finding]:
    """Yield that anybody who asks Celery for its settings sees passwords of nodes."""
    if facts.shown_passwords:
        what = (
            f"It holds the passwords of {', '.join(facts.shown_passwords)}: 'celery report' prints "
            "them, and 'celery inspect conf' shows them to anybody who may write to the broker."
        )
        fix = (
            "Set redlock_username and redlock_password, which Celery masks. Sentinels have no such "
            "settings: let them in without a password, by a client's certificate or by network."
        )
        yield Finding(WARNING, "password-in-url", "redlock_nodes", what, fix)


def same_server(facts: Facts) -> Iterator[Finding]:
    """Yield that two nodes are one."""
    seen: dict[str, str] = {}
    for node in facts.nodes:
        run_id = node.info.get("run_id", "")
        if run_id in seen:
            what = f"It is the same server as {seen[run_id]}: one failure takes two votes."
            fix = "Every node must be a server of its own."
            yield Finding(ERROR, "same-server", node.node, what, fix)
        elif run_id:
            seen[run_id] = node.node


def no_quorum(facts: Facts) -> Iterator[Finding]:
    """Yield that no lock can be taken now."""
    voting, needed = sum(1 for node in facts.nodes if node.votes), quorum(len(facts.nodes))
    if voting < needed:
        what = (
            f"{votes_needed(voting, len(facts.nodes), needed)}: no lock can be taken or renewed, "
            "and on_unavailable decides what happens to tasks."
        )
        fix = f"Fix the nodes that are named; '{redlock_command('status')}' shows them all."
        if all(node.state == "unmarked" or node.quarantine for node in facts.nodes):
            command = redlock_command("bootstrap")
            fix = f"All are new or restarted. If nobody can hold a lock: {command}"
        yield Finding(ERROR, "no-quorum", "", what, fix)


def clock_spread(facts: Facts) -> Iterator[Finding]:
    """Yield that the nodes' clocks are apart."""
    known = [(n.clock_offset, n.node) for n in facts.nodes if n.clock_offset is not None]
    if not known:
        return
    (slow, behind), (fast, ahead) = min(known), max(known)
    harmful = facts.settings.rules.longest_skew
    if fast - slow > harmful:
        what = (
            f"The clock of {ahead} is {fast - slow:.1f} s ahead of that of {behind}: a client "
            f"that agrees with one may be refused by the other (more than {harmful:.1f} s)."
        )
        fix = "Run NTP or chrony on all nodes."
        yield Finding(ERROR, "clock-spread", "", what, fix)


def no_hiredis(facts: Facts) -> Iterator[Finding]:
    """Yield that replies are read slowly."""
    if not facts.has_hiredis:
        what = "hiredis is not installed here; redis-py reads replies more slowly without."
        fix = "pip install 'celery-redlock[hiredis]'"
        yield Finding(NOTE, "no-hiredis", "", what, fix)
