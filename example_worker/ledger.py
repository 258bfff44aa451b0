"""
What the tasks write to: a database that refuses a writer whose lock has passed on.

PostgreSQL or whatever else ``LEDGER_URL`` names, as SQLAlchemy writes it; without it a SQLite
file. Every write raises the guard row of its lock first, in the same transaction, so a writer
that was paused for too long changes nothing. A task that looks before it writes claims the
ledger before it looks: what it has seen, no earlier holder can change any more.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from celery_redlock.fencing.sqlalchemy import fence_table, raise_fence

SQLITE = f"sqlite:///{Path(tempfile.gettempdir(), 'example-ledger.db')}"
URL = os.environ.get("LEDGER_URL") or SQLITE

META = MetaData()
GUARD = fence_table(META)
ENTRY = Table(
    "entry",
    META,
    Column("name", String(200), primary_key=True),
    Column("content", String, nullable=False),
    Column("fence", BigInteger),
    Column("writes", Integer, nullable=False),
)
ITEM = Table(
    "item",
    META,
    Column("id", Integer, primary_key=True),
    Column("customer", Integer, nullable=False, index=True),
    Column("name", String, nullable=False),
)


@cache
def engine() -> Engine:
    """Return the way to the database, with the tables made."""
    made = create_engine(URL, poolclass=NullPool)  # no connection is taken along by a fork
    for _ in META.tables:
        with suppress(DBAPIError):  # another process was making that table
            META.create_all(made)
    return made


def claim(lock: str, fence: int | None) -> None:
    """
    Shut out all earlier holders of a lock.

    Args:
        lock: Lock name.
        fence: The holder's fencing number; None where the task runs without a lock, which
            this store then cannot tell from any other writer.

    Raises:
        StaleFence: A later holder of the lock was here before.
    """
    with engine().begin() as db:
        guard(db, lock, fence)


def guard(db: Connection, lock: str, fence: int | None) -> None:
    """Let nobody but the newest holder of *lock* write in this transaction."""
    if fence is not None:
        raise_fence(db, GUARD, lock, fence)


def write(lock: str, fence: int | None, name: str, content: str) -> None:
    """Write one entry on behalf of the holder of a lock; the rest as of `claim`."""
    with engine().begin() as db:
        guard(db, lock, fence)
        values = {"content": content, "fence": fence}
        again = {**values, "writes": ENTRY.c.writes + 1}
        if not db.execute(update(ENTRY).where(ENTRY.c.name == name).values(again)).rowcount:
            db.execute(insert(ENTRY).values(name=name, writes=1, **values))


def read(name: str) -> str | None:
    """Return the content of one entry, None if there is none."""
    with engine().begin() as db:
        return db.execute(select(ENTRY.c.content).where(ENTRY.c.name == name)).scalar()


def count() -> int:
    """Return how many entries there are."""
    with engine().begin() as db:
        return db.execute(select(func.count()).select_from(ENTRY)).scalar_one()


def count_items(customer: int) -> int:
    """Return how many items a customer has."""
    with engine().begin() as db:
        found = select(func.count()).where(ITEM.c.customer == customer)
        return db.execute(found).scalar_one()


def add_item(lock: str, fence: int | None, customer: int, name: str) -> None:
    """Add an item; nothing in the database limits how many. The rest as of `claim`."""
    with engine().begin() as db:
        guard(db, lock, fence)
        db.execute(insert(ITEM).values(customer=customer, name=name))
