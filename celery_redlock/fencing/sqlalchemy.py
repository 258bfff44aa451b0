"""
Fenced writes with SQLAlchemy 2, Core or ORM: only the newest holder of a lock may write.

Where a row has a column for the fence, `fenced_update` compares and raises it in the UPDATE
itself. Where one lock protects many rows, or rows that are yet to be inserted, a guard row per
lock does it (`fence_table`, `raise_fence`). Both belong in the transaction of the write: let
`StaleFence` end it, so that nothing of it stays. With AUTOCOMMIT they cannot protect.

Under REPEATABLE READ or SERIALIZABLE the database itself may refuse instead, with its own error
for two transactions that get in each other's way. Begin the transaction again, as for any other;
then a stale writer meets `StaleFence`.

With asyncio: ``await session.run_sync(fenced_update, statement, fence)``, and likewise with a
connection and with `raise_fence`.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    MetaData,
    String,
    Table,
    Update,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, scoped_session

from celery_redlock.errors import StaleFence
from celery_redlock.fencing.number import checked

__all__ = ["fence_table", "fenced_update", "raise_fence"]

#: Longest name of a lock: what every database can index.
LONGEST_NAME = 255


def fenced_update(
    connection: Connection | Session | scoped_session[Any],
    statement: Update,
    fence: int | None,
    *,
    column: str = "fence",
) -> int:
    """
    Execute an UPDATE, unless a row that it is to change was written by a later holder.

    The rows' fence becomes *fence*. A row without one (NULL) was written by nobody yet. A row
    that the statement's own WHERE does not find (any more) is neither changed nor an error, so
    let it name the row, not a state that another writer may change.

    Args:
        connection: In the transaction of the write.
        statement: ``update(...).where(...).values(...)`` of a table or an ORM class.
        fence: The holder's number.
        column: Name of the table's column, or of the class's attribute, for the fence; a
            BIGINT that nobody else writes to.

    Returns:
        How many rows were written.

    Raises:
        StaleFence: A later holder has written to at least one of the rows. Others may have
            been changed before that was seen: end the transaction without a commit.
        ValueError: *fence* is None, negative or too large, there is no such *column*, or the
            statement is to return something.
        TypeError: *fence* is not an ``int``.
    """
    number, seen = checked(fence), _column_of(statement, column)
    if statement._returning:  # noqa: SLF001  no public way to ask
        raise ValueError("a fenced update tells how many rows it wrote: it takes no returning()")
    allowed = statement.where(or_(seen.is_(None), seen <= number)).values({seen: number})
    # An UPDATE waits for a row that somebody else is writing to, and then compares what that
    # one has committed. Nothing that was read earlier would be as new.
    written: int = connection.execute(allowed).rowcount  # type: ignore[attr-defined]
    newer = select(seen).where(seen > number)
    if statement.whereclause is not None:
        newer = newer.where(statement.whereclause)
    # FOR UPDATE sees what is committed; MySQL's plain SELECT sees what was when it first read.
    refusing = connection.execute(newer.with_for_update()).scalars().all()
    if refusing:
        raise StaleFence(_table_of(statement), number, max(refusing))
    return written


def fence_table(metadata: MetaData, name: str = "redlock_fence") -> Table:
    """
    Add a table of guard rows: a lock's name, and the largest fence that wrote under it.

    Args:
        metadata: That creates the application's tables.
        name: Of the table.
    """
    return Table(
        name,
        metadata,
        Column("lock", exact_name(), primary_key=True),
        Column("fence", BigInteger, nullable=False),
    )


def exact_name() -> String:
    """Return the type of a lock's name, which is another one if a single letter's case differs."""
    by_bytes = mysql.VARCHAR(LONGEST_NAME, charset="utf8mb4", collation="utf8mb4_bin")
    by_code = String(LONGEST_NAME, collation="Latin1_General_100_BIN2")
    return (
        String(LONGEST_NAME)
        .with_variant(by_bytes, "mysql", "mariadb")
        .with_variant(by_code, "mssql")
    )


def raise_fence(
    connection: Connection | Session | scoped_session[Any],
    table: Table,
    name: str,
    fence: int | None,
) -> None:
    """
    Raise the guard row of a lock; what the same transaction writes afterwards is fenced.

    The row stays locked until the transaction ends, so that holders of one lock write one
    after the other. Call it before the first write. If what is written depends on what was read,
    call it before that is read, in a transaction of its own if need be: what the newest holder
    has seen, no earlier one changes any more.

    Args:
        connection: In the transaction of the write.
        table: Made by `fence_table`.
        name: Lock name, at most 255 characters.
        fence: The holder's number.

    Raises:
        StaleFence: A later holder has written under this lock.
        ValueError: *fence* is None, negative or too large, or *name* too long.
        TypeError: *fence* is not an ``int``.
    """
    number = checked(fence)
    if len(name) > LONGEST_NAME:
        raise ValueError(f"the name of a guard row has at most {LONGEST_NAME} characters")
    if _raised(connection, table, name, number):
        return
    try:
        with connection.begin_nested():
            connection.execute(insert(table).values(lock=name, fence=number))
    except IntegrityError:
        # Somebody else made the row meanwhile. If it is not seen even so, this transaction
        # looks at an older state of the database, and has to begin again.
        if not _raised(connection, table, name, number):
            raise


def _raised(connection: Any, table: Table, name: str, number: int) -> bool:
    row = update(table).where(table.c.lock == name)
    try:
        return fenced_update(connection, row, number) > 0
    except StaleFence as stale:
        raise StaleFence(name, stale.fence, stale.newest) from None


def _column_of(statement: Update, name: str) -> Any:
    entity = statement.entity_description.get("entity")
    found = statement.table.c.get(name) if entity is None else getattr(entity, name, None)
    if found is None:
        raise ValueError(f"{_table_of(statement)!r} has no column {name!r} for the fence")
    return found


def _table_of(statement: Update) -> str:
    return str(statement.entity_description["table"].name)
