"""The kinds of node that contract tests run over, and what does not hold of which."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from celery_redlock.testing.servers import find_binary
from support.machine import found
from support.postgres import FAST, Postgres, find_postgres, postgres

__all__ = [
    "DATABASES",
    "KINDS_OF_NODE",
    "POSTGRESQL",
    "SERVERS",
    "binaries",
    "each",
    "marks_of",
    "postgres_by_kind",
    "those_here",
]

SERVERS = ("redis", "valkey")
#: Kinds of PostgreSQL -> which: that of the machine, and one that is newer than it may have.
POSTGRESQL: dict[str, int | None] = {"postgresql": None, "postgresql-18": 18}
DATABASES = (*POSTGRESQL, "sqlite")
KINDS_OF_NODE = (*SERVERS, *DATABASES)

NO_REPLICAS = "a database follows no other while it is the node; its timeline says if it did"
NO_USERS = "rights in a database are those of its tables"
NO_EVICTION = "a database evicts nothing"
NO_OUTAGE = "it is a server of Redis that is made unwell, beside one of its kind"
SAME_COMMANDS = "its keyspace is that of the node in memory: what is wrong there is wrong in both"
#: Tests of what a database has not -> why.
NOT_OF_DATABASES = {
    "test_a_command_that_only_says_that_it_did_is_found_out": SAME_COMMANDS,
    "test_a_full_server_refuses_what_needs_memory": NO_OUTAGE,
    "test_a_node_is_quarantined_once_for_having_been_a_replica": NO_REPLICAS,
    "test_a_node_that_was_a_replica_is_quarantined_by_whoever_connects": NO_REPLICAS,
    "test_a_node_that_was_a_replica_is_quarantined_by_whoever_probes": NO_REPLICAS,
    "test_a_replica_refuses_to_write": NO_OUTAGE,
    "test_a_server_that_has_evicted_keys_is_known_by_their_count": NO_EVICTION,
    "test_a_server_that_was_a_replica_is_known_by_its_history": NO_REPLICAS,
    "test_a_server_whose_script_goes_on_and_on_is_busy": NO_OUTAGE,
    "test_a_user_who_may_not_is_refused": NO_USERS,
    "test_an_operator_may_say_that_nothing_is_held_there": NO_REPLICAS,
    "test_evicted_keys_are_a_memory_that_was_lost": NO_EVICTION,
    "test_who_may_not_tell_others_can_release": NO_USERS,
}


def binaries() -> dict[str, Path]:
    """Return the program of each kind of server that is here."""
    found = {}
    for kind in ("valkey", "redis"):
        try:
            found[kind] = find_binary(kind)
        except RuntimeError:
            continue
    return found


def those_here() -> list[str]:
    """Return the kinds that this machine has."""
    here = [*sorted(binaries()), "sqlite"]
    for kind, major in POSTGRESQL.items() if importlib.util.find_spec("psycopg") else ():
        try:
            find_postgres(major)
        except RuntimeError:
            continue
        here.append(kind)
    return here


def each(kinds: Iterable[str] = DATABASES) -> list[Any]:
    """Return *kinds* as parameters: that of a version beside the machine's is long."""
    beside = {kind for kind, major in POSTGRESQL.items() if major}
    return [pytest.param(it, marks=[pytest.mark.long] if it in beside else []) for it in kinds]


def marks_of(kind: str, test: str) -> Collection[Any]:
    """Return what a test of a kind is marked with, by its function's name."""
    if kind not in DATABASES:
        return []
    reason = NOT_OF_DATABASES.get(test)
    return [pytest.mark.long, *([pytest.mark.skip(reason=reason)] if reason else [])]


@contextmanager
def postgres_by_kind(settings: Mapping[str, str] = FAST) -> Iterator[Callable[[str], Postgres]]:
    """Yield what returns the server of a kind, which it starts when it is first asked for."""
    with ExitStack() as stack:

        @cache
        def server_of(kind: str) -> Postgres:
            programs = found(lambda: find_postgres(POSTGRESQL[kind]))
            return stack.enter_context(postgres(programs, settings))

        yield server_of
