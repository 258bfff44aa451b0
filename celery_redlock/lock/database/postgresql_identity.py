"""
Who a PostgreSQL is that was connected, and whether it may be the lock node.

Its ``run_id`` is another one once it may have forgotten a commit: with the files of another server,
another database or table, after a promotion, after a crash where commits are asynchronous, and
after any restart where a crash may lose more than the last of them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg import errors

from celery_redlock.lock.database.postgresql_words import (
    READS,
    WEAK,
    are_made,
    no_rights,
    no_tables,
    others_schema,
    others_table,
    schemas_elsewhere,
    stamp_of,
    system_id,
    unlogged,
)
from celery_redlock.lock.database.store import META, Broken
from celery_redlock.lock.nodes.guard import Unfit

if TYPE_CHECKING:
    from celery_redlock.lock.database.postgresql import Postgres

__all__ = ["Identity", "has_tables", "identify"]

REPLICA = "is a replica, but a lock node must be the primary: name that one"
MISSING = (errors.UndefinedTable, errors.InvalidSchemaName)


class Identity(NamedTuple):
    """
    Who a database is; `Store` says more of those that it has, too.

    Attributes:
        stamped: Of `stamp`, as columns in SQL.
        stamp: Changes when the database may have forgotten a commit, or is started anew.
        limits: The settings of each transaction.
        micros: The database's clock.
    """

    run_id: str
    stamped: str
    stamp: str
    version: str
    commits: str
    limits: tuple[str, ...]
    made: int
    micros: int


def identify(store: Postgres, schema: str, name: str, *, is_async: bool) -> Identity:
    """Read what the database and the tables say of themselves; `Unfit` if they do not fit."""
    known = _or_unfit(
        store,
        schema,
        name,
        f"SELECT '{store.table}'::regclass::oid::bigint, pg_is_in_recovery(), "
        "current_setting('server_version'), current_setting('fsync'), "
        "current_setting('full_page_writes'), current_setting('synchronous_commit'), "
        "(SELECT oid::text FROM pg_database WHERE datname = current_database())",
        f"SELECT value FROM {store.table} WHERE key = {store.literal(META)} ORDER BY part",
        f"SELECT bool_and(has_table_privilege(it, 'INSERT') AND has_table_privilege(it, "
        "'UPDATE') AND has_table_privilege(it, 'DELETE')) FROM unnest(ARRAY["
        f"'{store.table}', '{unlogged(schema, name)}']) AS it",
        f"SELECT 1 FROM {unlogged(schema, name)}",
    )
    (
        ((table_id, is_replica, version, fsync, full_pages, strength, database),),
        meta,
        ((may_write,),),
        _,
    ) = known
    if is_replica:
        raise Unfit(REPLICA)
    if not may_write:
        raise Unfit(no_rights("it may only read them", schema, name))
    if len(meta) != 2:  # noqa: PLR2004  when, and which version
        raise Unfit(no_tables(store.table, "has tables that were emptied"))
    store.check_version(bytes(meta[1][0]))
    crash = unlogged(schema, name) if is_async else ""
    if crash:
        _note_since_crash(store, crash)
    stamped = stamp_of(table_id, crash)
    system, micros, stamp = _who_and_when(store, stamped)
    durable = "on" if strength in WEAK else strength
    commit = f"SET LOCAL synchronous_commit = {'off' if is_async else durable}"
    server, *rest = stamp.split()
    if is_async and len(rest) == 2:  # noqa: PLR2004  its timeline and the table's file
        msg = "it crashed while it was connected"
        raise Broken(msg)
    parts = [system, database, str(table_id), *rest]
    commits = "async" if is_async else "durable"
    if "off" in (fsync, full_pages):
        commits = "unsafe"
        parts.append(server)  # a restart may have been a crash
    return Identity(
        run_id=hashlib.sha1("\n".join(parts).encode()).hexdigest(),  # noqa: S324  no secret
        stamped=stamped,
        stamp=stamp,
        version=f"PostgreSQL {version.split()[0]}",
        commits=commits,
        limits=(*store.limits, commit),
        made=int(bytes(meta[0][0])),
        micros=micros,
    )


def has_tables(store: Postgres, schema: str, name: str) -> bool:
    """
    Return whether both tables are there and know their version.

    Raises `Unfit` without rights, and if they are in a schema that is not looked in.
    """
    crash = unlogged(schema, name)
    both = f"to_regclass('{store.table}') IS NOT NULL AND to_regclass('{crash}') IS NOT NULL"
    (((are_there,),),) = store.alone(READS, f"SELECT {both}")
    if not are_there:
        if not schema:
            _check_other_schemas(store, name)
        return False
    (((is_known,),),) = _or_unfit(store, schema, name, are_made(store.table))
    return bool(is_known)


def _check_other_schemas(store: Postgres, name: str) -> None:
    """Raise `Unfit` if users of other search_paths have these tables: both would hold one lock."""
    (found,) = store.alone(READS, schemas_elsewhere(name))
    for (other,) in found:
        raise Unfit(others_schema(store.table, other))


def _who_and_when(store: Postgres, stamped: str) -> tuple[str, int, str]:
    """
    Return whose files these are, the clock, and the stamp.

    In two trips: `Unfit` where no transaction lasts longer than one.
    """
    try:
        *_, ((system,),), ((micros, stamp),) = store.sent(
            READS, *store.limits, f"SELECT {system_id()}", store.now(stamped)
        )
    except Broken as error:
        if "statement pooling" in str(error):  # as PgBouncer says in all languages
            msg = "is behind a pooler in statement mode; have it pool transactions or sessions"
            raise Unfit(msg) from None
        raise
    store.sent("COMMIT")
    return str(system), micros, stamp


def _note_since_crash(store: Postgres, crash: str) -> None:
    """Have an id that only a crash changes in a table that PostgreSQL empties then."""
    store.run(
        "SET LOCAL synchronous_commit = off",  # no standby is to be waited for
        f"INSERT INTO {crash} (id) VALUES (gen_random_uuid()) ON CONFLICT DO NOTHING",
    )


def _or_unfit(
    store: Postgres, schema: str, name: str, *statements: str
) -> list[list[tuple[Any, ...]]]:
    try:
        return store.alone(READS, *statements)
    except Broken as error:
        if isinstance(error.__cause__, MISSING):
            raise Unfit(no_tables(store.table, "has no tables for locks")) from None
        if isinstance(error.__cause__, errors.UndefinedColumn):
            raise Unfit(others_table(store.table)) from None
        if isinstance(error.__cause__, errors.InsufficientPrivilege):
            raise Unfit(no_rights(str(error), schema, name)) from None
        if isinstance(error.__cause__, errors.FeatureNotSupported):  # to read what is not logged
            raise Unfit(REPLICA) from None
        raise
