"""What a fence is, how a stale one is told, and what the fencing helpers import."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from celery import Celery, states
from redis.crc import key_slot
from sqlalchemy import BigInteger, Column, MetaData, String, Table, create_engine, insert, update
from sqlalchemy.dialects import mssql, mysql, postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import StaticPool
from sqlalchemy.schema import CreateTable

import celery_redlock
from celery_redlock.errors import RedlockError
from celery_redlock.fencing import StaleFence
from celery_redlock.fencing.number import checked
from celery_redlock.fencing.redis import fence_key, fenced_set
from celery_redlock.fencing.sqlalchemy import fence_table, fenced_update, raise_fence

ROOT = Path(celery_redlock.__file__).parents[1]
STALE = StaleFence("invoice", 1001, 1002)

NO_FENCES = [
    (None, ValueError, r"fence is None: .*locks_disabled\(\).*write that without a fence"),
    (True, TypeError, "must be an int, got bool"),
    ("7", TypeError, "must be an int, got str"),
    (7.0, TypeError, "must be an int, got float"),
    (-1, ValueError, "between 0 and 2"),
    (2**53 + 1, ValueError, "between 0 and 2"),
]


@pytest.mark.parametrize("fence", [0, 1, 2**31, 2**53 - 1, 2**53])
def test_a_fence_is_any_number_that_every_store_compares_exactly(fence):
    assert checked(fence) == fence


@pytest.mark.parametrize(("fence", "error", "words"), NO_FENCES)
def test_what_is_no_fence_is_refused_with_a_reason(fence, error, words):
    """Above all None, which a task has that runs without a lock: the message says what to do."""
    with pytest.raises(error, match=words):
        checked(fence)


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        (mysql.dialect(), "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"),
        (mssql.dialect(), "VARCHAR(255) COLLATE Latin1_General_100_BIN2"),
        (postgresql.dialect(), "VARCHAR(255) NOT NULL"),
    ],
)
def test_names_that_differ_in_case_have_rows_of_their_own(dialect, words):
    """Under a database's own collation "Report" and "report" could share one."""
    made = str(CreateTable(fence_table(MetaData())).compile(dialect=dialect))
    assert words in made


def test_every_helper_checks_its_fence_before_it_asks_the_store():
    table = fence_table(MetaData())
    calls = [
        lambda: fenced_update(None, update(table), None),
        lambda: raise_fence(None, table, "stock", None),
        lambda: fenced_set(None, "stock", b"7", None),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="fence is None"):
            call()


def test_the_text_tells_both_numbers():
    assert str(STALE) == "Fence 1001 is stale: 'invoice' was written to with 1002"
    assert str(StaleFence("a", 1)) == "Fence 1 is stale: 'a' was written to with a newer one"
    assert isinstance(STALE, RedlockError)


@pytest.mark.parametrize("error", [STALE, StaleFence("invoice", 1001)])
@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
def test_a_caller_gets_the_stale_fence_the_task_failed_with(error, serializer):
    app = Celery(backend="cache+memory://", set_as_current=False)
    app.conf.update(result_serializer=serializer, accept_content=[serializer])
    task_id = str(uuid4())
    app.backend.store_result(task_id, error, states.FAILURE)
    with pytest.raises(StaleFence) as raised:
        app.AsyncResult(task_id).get(timeout=60)
    for copy in (raised.value, pickle.loads(pickle.dumps(error))):
        assert (vars(copy), copy.args, str(copy)) == (vars(error), error.args, str(error))
    assert json.loads(json.dumps(error.args)) == list(error.args)


@pytest.mark.parametrize(
    ("module", "brings", "not_even"),
    [
        ("celery_redlock.fencing", set(), {"redis", "sqlalchemy", "django", "celery"}),
        ("celery_redlock.fencing.sqlalchemy", {"sqlalchemy"}, {"redis", "django", "celery"}),
        ("celery_redlock.fencing.django", {"django"}, {"redis", "sqlalchemy", "celery"}),
        ("celery_redlock.fencing.redis", {"redis"}, {"sqlalchemy", "django", "celery"}),
    ],
)
def test_each_helper_needs_its_own_library_alone(module, brings, not_even):
    for library in brings:
        pytest.importorskip(library)
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = set(done.stdout.split())
    assert brings <= loaded
    assert not_even & loaded == set()


def test_no_helper_can_be_called_without_its_library():
    program = """
import sys
sys.modules["sqlalchemy"] = sys.modules["django"] = None
from celery_redlock.fencing import StaleFence
for name in ("sqlalchemy", "django"):
    try:
        __import__(f"celery_redlock.fencing.{name}")
    except ImportError as error:
        assert name in str(error), error
    else:
        raise SystemExit(f"{name} was imported")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize(
    ("key", "stands_at"),
    [
        ("stock", "fence:{stock}"),
        ("a{b", "fence:{a{b}"),
        ("a{}b", "a{}b:fence"),
        ("{shop}:stock", "{shop}:stock:fence"),
        ("a:{shop}:stock", "a:{shop}:stock:fence"),
        ("odd}", "odd}:fence"),
    ],
)
def test_the_fence_of_a_key_is_in_its_slot(key, stands_at):
    """A cluster hashes what is in the first braces; a key without any is put in braces."""
    assert fence_key(key) == stands_at
    is_in_its_slot = key_slot(key.encode()) == key_slot(stands_at.encode())
    assert is_in_its_slot == (key not in {"a{}b", "odd}"})  # as the docstring says


NO_TIMES = [{"ttl": 0}, {"ttl": -1.0}, {"ttl": 1.0, "remember": 0}, {"ttl": float("inf")}]


@pytest.mark.parametrize("times", NO_TIMES)
def test_a_time_that_is_none_is_refused(times):
    """A value that is gone at once, or a fence that does not outlive it, would protect nothing."""
    with pytest.raises(ValueError, match="must be > 0"):
        fenced_set(None, "stock", b"7", 7, **times)


# -- the statements ----------------------------------------------------------------------


@pytest.fixture
def db():
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.connect() as connection, connection.begin():
        yield connection
    engine.dispose()


META = MetaData()
INVOICE = Table(
    "invoice",
    META,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("state", String(20), nullable=False),
    Column("fence", BigInteger),
)


class Base(DeclarativeBase):
    """Of the classes of this file."""


class Document(Base):
    """One whose attribute for the fence is not called as its column is."""

    __tablename__ = "document"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    title: Mapped[str] = mapped_column(String(20))
    written_by: Mapped[int | None] = mapped_column("fence", BigInteger)
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "document"}  # noqa: RUF012


class Letter(Document):
    __mapper_args__ = {"polymorphic_identity": "letter"}  # noqa: RUF012


def test_a_column_that_is_not_there_is_named(db):
    """It is not found out by the database, halfway."""
    with pytest.raises(ValueError, match="'invoice' has no column 'number' for the fence"):
        fenced_update(db, update(INVOICE), 7, column="number")
    with pytest.raises(ValueError, match="'document' has no column 'fence' for the fence"):
        fenced_update(db, update(Document), 7)


def test_an_update_that_returns_something_is_refused(db):
    """Before it is executed: who asks for rows would not get them."""
    with pytest.raises(ValueError, match="takes no returning"):
        fenced_update(db, update(INVOICE).returning(INVOICE.c.id), 7)


def test_a_guard_rows_name_that_a_database_would_cut_is_refused(db):
    """Two names that begin alike would share a row."""
    table = fence_table(META, "guards")
    table.create(db)
    with pytest.raises(ValueError, match="at most 255"):
        raise_fence(db, table, "x" * 256, 7)
    raise_fence(db, table, "x" * 255, 7)


def test_an_orm_class_is_updated_by_its_attribute():
    """Objects in the session follow; rows of another class in the same table do not count."""
    engine = create_engine("sqlite://", poolclass=StaticPool)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        letter, other = (
            Letter(id=1, title="old", written_by=6),
            Document(id=2, title="old", written_by=99),
        )
        session.add_all([letter, other])
        session.flush()
        statement = update(Letter).where(Letter.title == "old").values(title="new")
        assert fenced_update(session, statement, 7, column="written_by") == 1
        assert (letter.title, letter.written_by, other.title) == ("new", 7, "old")
        statement = update(Document).where(Document.title == "old").values(title="new")
        with pytest.raises(StaleFence) as stale:
            fenced_update(session, statement, 8, column="written_by")
        assert stale.value.args == ("document", 8, 99)
    engine.dispose()


def test_without_a_where_every_row_counts(db):
    META.create_all(db)
    db.execute(insert(INVOICE), [{"id": n, "state": "open", "fence": n} for n in (1, 2, 3)])
    assert fenced_update(db, update(INVOICE).values(state="paid"), 3) == 3
    with pytest.raises(StaleFence):
        fenced_update(db, update(INVOICE).values(state="open"), 2)


class Recorder:
    def __init__(self):
        self.statements = []
        self.rowcount = 0

    def execute(self, statement):
        self.statements.append(statement)
        return self

    def scalars(self):
        return self

    def all(self):
        return []


@pytest.mark.parametrize(
    ("dialect", "ends_with"),
    [(postgresql, "FOR UPDATE"), (mysql, "FOR UPDATE"), (sqlite, "")],
    ids=["postgresql", "mysql", "sqlite"],
)
def test_the_second_look_sees_what_is_committed(dialect, ends_with):
    """MySQL's plain SELECT would look at an old snapshot; SQLite has one writer anyway."""
    recorder = Recorder()
    statement = update(INVOICE).where(INVOICE.c.id == 7).values(state="paid")
    assert fenced_update(recorder, statement, 7) == 0
    written, looked = [
        " ".join(str(s.compile(dialect=dialect.dialect())).split()) for s in recorder.statements
    ]
    assert "(invoice.fence IS NULL OR invoice.fence <=" in written
    assert "SET state=" in written
    assert "fence=" in written.partition(" WHERE ")[0]
    assert looked.endswith(ends_with)
    assert ("FOR UPDATE" in looked) == bool(ends_with)
