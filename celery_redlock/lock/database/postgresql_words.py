"""What of PostgreSQL's SQL needs no connection: names, the statements of the tables, complaints."""

from __future__ import annotations

from celery_redlock.lock.database.store import META, VERSION
from celery_redlock.words import redlock_command

__all__ = [
    "CLOCK",
    "LIMITS",
    "READS",
    "WEAK",
    "WRITES",
    "are_made",
    "bytea",
    "drops",
    "no_rights",
    "no_tables",
    "others_schema",
    "others_table",
    "qualified",
    "schemas_elsewhere",
    "stamp_of",
    "system_id",
    "tables",
    "unlogged",
]

#: How a transaction of ours begins, whatever the user's own default is.
WRITES = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
READS = "BEGIN READ ONLY, ISOLATION LEVEL REPEATABLE READ"
#: The settings of each: a pooler keeps none for us, and leaves us those of others. Longest
#: statement, wait for a lock, and pause of a client amid a transaction [ms].
LIMITS: tuple[str, ...] = (
    "SET LOCAL statement_timeout = 2000",
    "SET LOCAL lock_timeout = 1000",
    "SET LOCAL idle_in_transaction_session_timeout = 1000",
    "SET LOCAL search_path TO DEFAULT",
)
#: What of ``synchronous_commit`` lets a crash lose what was answered.
WEAK = ("off", "local")
CLOCK = "(date_part('epoch', clock_timestamp()) * 1000000)::bigint"  # [us, Unix time]


def qualified(schema: str, name: str) -> str:
    return f'"{schema}"."{name}"' if schema else f'"{name}"'


def unlogged(schema: str, name: str) -> str:
    return qualified(schema, f"{name}_crash")


def stamp_of(oid: int, crash: str) -> str:
    """
    Return what changes when another server is the database, or the table is another one.

    And where *crash* names a table that PostgreSQL empties then, after a crash: its own process
    goes on after that of one that serves a client, and a pooler keeps its own clients.
    """
    since_crash = f", (SELECT id::text FROM {crash})" if crash else ""
    return (
        "(date_part('epoch', pg_postmaster_start_time()) * 1000000)::bigint::text, "
        "CASE WHEN pg_is_in_recovery() THEN 'replica' ELSE "
        "substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END, "
        f"pg_relation_filenode({oid})::text{since_crash}"
    )


def bytea(data: bytes) -> str:
    """Return *data* as SQL, whatever standard_conforming_strings is."""
    return f"E'\\\\x{data.hex()}'::bytea"


def system_id() -> str:
    return (
        "CASE WHEN has_function_privilege('pg_control_system()', 'EXECUTE') "
        "THEN (SELECT system_identifier::text FROM pg_control_system()) ELSE '' END"
    )


def no_tables(table: str, what: str) -> str:
    return f"{what} ({table}); make them: {redlock_command('init')}"


def others_table(table: str) -> str:
    return f"has a table of somebody else ({table}): name another one by table= in the URL"


def schemas_elsewhere(name: str) -> str:
    """Return the query for a schema that has these tables, and that nobody looks in unasked."""
    return (
        "SELECT nspname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace "
        f"WHERE relname IN ('{name}', '{name}_crash') AND nspname <> ALL (current_schemas(false)) "
        "GROUP BY nspname HAVING count(*) = 2 ORDER BY nspname LIMIT 1"
    )


def are_made(table: str) -> str:
    """Return the query for whether a table that is there knows its version, and is ours."""
    return f"SELECT count(*) = 2 FROM {table} WHERE key = {bytea(META)}"


def others_schema(table: str, schema: str) -> str:
    return (
        f"has the tables for locks ({table}) in the schema {schema}, where this user's search_path "
        f"does not find them; write schema={schema} into all URLs, or another one for other locks"
    )


def no_rights(why: str, schema: str, name: str) -> str:
    both = f"{qualified(schema, name)}, {unlogged(schema, name)}"
    usage = f'GRANT USAGE ON SCHEMA "{schema}" TO this user; ' if schema else ""
    return (
        f"does not let this user use the tables for locks ({why}); have their owner run: {usage}"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {both} TO this user"
    )


def tables(schema: str, name: str) -> list[str]:
    """Return the statements that make the tables; they do no harm where these are."""
    table, crash = qualified(schema, name), unlogged(schema, name)
    meta = bytea(META)
    made = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint::text"
    found = []
    if schema:  # IF NOT EXISTS would ask for the right to make one where there is one
        found.append(
            f"DO $$ BEGIN IF to_regnamespace('\"{schema}\"') IS NULL THEN "
            f'CREATE SCHEMA "{schema}"; END IF; END $$'
        )
    found.append(
        f"CREATE TABLE IF NOT EXISTS {table} (key bytea NOT NULL, part bytea NOT NULL, "
        "kind smallint NOT NULL, value bytea NOT NULL, ends bigint, PRIMARY KEY (key, part)) "
        "WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05)"
    )
    found.append(
        f"CREATE UNLOGGED TABLE IF NOT EXISTS {crash} "
        "(one boolean PRIMARY KEY DEFAULT true CHECK (one), id uuid NOT NULL)"
    )
    found.append(
        f"INSERT INTO {table} (key, part, kind, value, ends) VALUES "
        f"({meta}, ':made', 0, convert_to({made}, 'UTF8'), NULL), "
        f"({meta}, ':version', 0, '{VERSION}', NULL) ON CONFLICT DO NOTHING"
    )
    return found


def drops(schema: str, name: str) -> list[str]:
    """Return the statements that drop what `tables` makes."""
    return [
        f"DROP TABLE IF EXISTS {it}" for it in (qualified(schema, name), unlogged(schema, name))
    ]
