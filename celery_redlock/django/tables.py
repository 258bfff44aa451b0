"""The step of a migration that makes our tables, or drops them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import router
from django.db.migrations.operations.base import Operation

from celery_redlock.lock.database.address import OURS, TABLE, dialect_of
from celery_redlock.lock.database.postgresql_words import (
    are_made,
    others_schema,
    qualified,
    schemas_elsewhere,
    unlogged,
)

__all__ = ["MakeTables"]

#: What Django calls a database -> what begins its URL in ``redlock_nodes``.
SCHEMES = {"postgresql": "postgresql://", "sqlite": "sqlite://"}


class MakeTables(Operation):  # type: ignore[misc]  # Django comes without types
    """Make the tables in the database ``REDLOCK_DATABASE``; leave any other as it is."""

    reduces_to_sql = True
    reversible = True

    def state_forwards(self, app_label: str, state: Any) -> None:
        """No model is in the tables."""

    def database_forwards(
        self,
        app_label: str,
        schema_editor: Any,
        from_state: Any,  # noqa: ARG002  as Django calls it
        to_state: Any,  # noqa: ARG002  likewise
    ) -> None:
        """Make them, unless they are there, as `redlock init` made them."""
        self._run(app_label, schema_editor, "tables")

    def database_backwards(
        self,
        app_label: str,
        schema_editor: Any,
        from_state: Any,  # noqa: ARG002  as Django calls it
        to_state: Any,  # noqa: ARG002  likewise
    ) -> None:
        """Drop them, and all locks with them."""
        self._run(app_label, schema_editor, "drops")

    def describe(self) -> str:
        """Return what Django says of this step."""
        return "Make the tables that keep the locks of Celery tasks"

    def _run(self, app_label: str, schema_editor: Any, what: str) -> None:
        connection = schema_editor.connection
        is_ours = connection.alias == getattr(settings, "REDLOCK_DATABASE", "default")
        if is_ours and router.allow_migrate(connection.alias, app_label):
            wanted = statements(connection.vendor, what)
            asks = connection.vendor == "postgresql" and not schema_editor.collect_sql
            if what == "tables" and asks and are_there(connection):
                return  # and who may use a schema need not be allowed to make something in it
            for statement in wanted:
                schema_editor.execute(statement, params=None)


def are_there(connection: Any) -> bool:
    """Return whether tables are made; raises ImproperlyConfigured if users have them elsewhere."""
    schema, name = named()
    table = qualified(schema, name)
    with connection.cursor() as cursor:
        both = "SELECT to_regclass(%s) IS NOT NULL AND to_regclass(%s) IS NOT NULL"
        cursor.execute(both, [table, unlogged(schema, name)])
        if cursor.fetchone()[0]:
            cursor.execute("SELECT has_table_privilege(%s, 'SELECT')", [table])
            if not cursor.fetchone()[0]:
                return True  # they are there, and somebody else's to judge
            cursor.execute(are_made(table))
            return bool(cursor.fetchone()[0])
        if not schema:
            cursor.execute(schemas_elsewhere(name))
            for (other,) in cursor.fetchall():
                raise ImproperlyConfigured(
                    f"The database {others_schema(table, other)}; REDLOCK_TABLE is then "
                    f"'{other}.{name}'"
                )
    return False


def statements(vendor: str, what: str) -> Sequence[str]:
    if vendor not in SCHEMES:
        raise ImproperlyConfigured(
            f"REDLOCK_DATABASE names a database of {vendor}; locks can be kept in PostgreSQL "
            "and SQLite"
        )
    found: Sequence[str] = getattr(dialect_of(SCHEMES[vendor]), what)(*named())
    return found


def named() -> tuple[str, str]:
    """Return schema and name of the table; raises ImproperlyConfigured."""
    schema, _, name = getattr(settings, "REDLOCK_TABLE", TABLE).rpartition(".")
    if not OURS["table"].fullmatch(name) or (schema and not OURS["schema"].fullmatch(schema)):
        raise ImproperlyConfigured(
            "REDLOCK_TABLE must be like 'celery_redlock' or 'schema.table', of letters, digits, "
            f"_ and, in the schema, -; got {settings.REDLOCK_TABLE!r}"
        )
    return schema, name
