"""
Fenced writes on real stores: SQLite, PostgreSQL, and Redis.

The two that get in each other's way have a connection each, and the stale one really waits for
the row: PostgreSQL says so. Each law has its twin, the same writes without the fence.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import redis
from sqlalchemy import (
    BigInteger,
    Column,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session, registry
from sqlalchemy.pool import NullPool

from celery_redlock.fencing import StaleFence
from celery_redlock.fencing.redis import fence_key, fenced_set
from celery_redlock.fencing.sqlalchemy import fence_table, fenced_update, raise_fence
from support.clusters import in_cluster_mode
from support.waiting import eventually

META = MetaData()
INVOICE = Table(
    "invoice",
    META,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("state", String(20), nullable=False),
    Column("writes", Integer, nullable=False, default=0),
    Column("fence", BigInteger),
)
GUARD = fence_table(META)
#: As large as the fences of real locks.
OLD, NEW = 7_400_000_000_000_001, 7_400_000_000_000_002


def setting(state, *ids):
    values = {"state": state, "writes": INVOICE.c.writes + 1}
    return update(INVOICE).where(INVOICE.c.id.in_(ids)).values(values)


def unfenced(connection, statement, _fence):
    return connection.execute(statement).rowcount


class Store:
    def __init__(self, url):
        self.is_sqlite = url.startswith("sqlite")
        patience = {"timeout": 60} if self.is_sqlite else {}
        self.engine = create_engine(url, connect_args=patience, poolclass=NullPool)
        META.create_all(self.engine)

    def add(self, **fences):
        """Add open invoices, ``i7=None`` for number 7 without a fence."""
        rows = [{"id": int(n[1:]), "state": "open", "fence": f} for n, f in fences.items()]
        with self.engine.begin() as connection:
            connection.execute(insert(INVOICE), rows)

    def states(self):
        with self.engine.connect() as connection:
            rows = connection.execute(select(INVOICE))
            return {row.id: (row.state, row.fence) for row in rows}

    def guards(self):
        with self.engine.connect() as connection:
            return {row.lock: row.fence for row in connection.execute(select(GUARD))}

    def wait_until_somebody_waits(self):
        asked = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            eventually(lambda: connection.execute(asked).scalar(), "connection that waits")


@pytest.fixture
def sqlite(tmp_path):
    store = Store(f"sqlite:///{tmp_path / 'store.sqlite3'}")
    yield store
    store.engine.dispose()


@pytest.fixture
def postgresql(database):
    store = Store(database.url)
    yield store
    store.engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request):
    return request.getfixturevalue(request.param)


# -- one after the other -------------------------------------------------------------------


def test_the_newest_holder_writes_and_an_older_one_does_not(store):
    store.add(i7=None, i8=0)
    for fence in (OLD, OLD, NEW, NEW):
        with store.engine.begin() as connection:
            assert fenced_update(connection, setting("paid", 7, 8), fence) == 2
    with pytest.raises(StaleFence) as stale, store.engine.begin() as connection:
        fenced_update(connection, setting("open", 7), OLD)
    assert stale.value.args == ("invoice", OLD, NEW)
    assert store.states() == {7: ("paid", NEW), 8: ("paid", NEW)}


def test_numbers_are_compared_exactly_at_their_largest(store):
    """At 2**53, where a store that took them for doubles would be at its end."""
    store.add(i7=2**53 - 1)
    with store.engine.begin() as connection:
        assert fenced_update(connection, setting("paid", 7), 2**53) == 1
    with pytest.raises(StaleFence), store.engine.begin() as connection:
        fenced_update(connection, setting("open", 7), 2**53 - 1)


def test_a_row_that_is_not_there_is_not_stale(store):
    """Nothing found is nothing written, as with any UPDATE."""
    store.add(i7=NEW)
    with store.engine.begin() as connection:
        assert fenced_update(connection, setting("paid", 404), OLD) == 0


def test_many_rows_are_all_written_or_none(store):
    store.add(i1=None, i2=NEW, i3=1)
    with pytest.raises(StaleFence) as stale, store.engine.begin() as connection:
        fenced_update(connection, setting("paid", 1, 2, 3), OLD)
    assert stale.value.newest == NEW
    assert {state for state, _ in store.states().values()} == {"open"}
    with store.engine.begin() as connection:
        assert fenced_update(connection, setting("paid", 1, 3), OLD) == 2


def test_a_session_writes_fenced_as_well(store):
    store.add(i7=NEW)
    with pytest.raises(StaleFence), Session(store.engine) as session, session.begin():
        fenced_update(session, setting("paid", 7), OLD)
    with Session(store.engine) as session, session.begin():
        raise_fence(session, GUARD, "invoice:7", NEW)
    with pytest.raises(StaleFence), Session(store.engine) as session, session.begin():
        raise_fence(session, GUARD, "invoice:7", OLD)


class Entity:
    """An invoice, for the ORM."""


def test_objects_of_a_session_follow_a_fenced_update(store):
    mapper = registry()
    mapper.map_imperatively(Entity, INVOICE)
    store.add(i7=OLD, i8=OLD, i9=None)
    with Session(store.engine) as session, session.begin():
        objects = session.scalars(select(Entity).order_by(Entity.id)).all()
        found = func.lower(Entity.state, type_=String) == "open"
        some = update(Entity).where(found, Entity.id < 9).values(state="paid")
        assert fenced_update(session, some, NEW) == 2
        assert [(o.state, o.fence) for o in objects] == [("paid", NEW)] * 2 + [("open", None)]
    mapper.dispose()
    assert store.states() == {7: ("paid", NEW), 8: ("paid", NEW), 9: ("open", None)}


def test_a_guard_row_protects_what_is_written_beside_it(store):
    for lock, fence in (("a", OLD), ("a", OLD), ("a", NEW), ("b", OLD)):
        with store.engine.begin() as connection:
            raise_fence(connection, GUARD, lock, fence)
    with pytest.raises(StaleFence) as stale, store.engine.begin() as connection:
        raise_fence(connection, GUARD, "a", OLD)
        connection.execute(insert(INVOICE).values(id=1, state="open"))
    assert stale.value.args == ("a", OLD, NEW)
    assert store.states() == {}
    assert store.guards() == {"a": NEW, "b": OLD}


def test_a_guard_row_is_not_raised_by_a_transaction_that_fails(store):
    with pytest.raises(ZeroDivisionError), store.engine.begin() as connection:
        raise_fence(connection, GUARD, "a", NEW)
        raise ZeroDivisionError
    with store.engine.begin() as connection:
        raise_fence(connection, GUARD, "a", OLD)


# -- at the same time ----------------------------------------------------------------------


def race(store, write, *, isolation="READ COMMITTED", begin=None):
    """
    Let a stale writer wait for the row that the newest one is just writing to.

    Returns:
        What became of the stale one: the rows it wrote, or its error.
    """
    stale = store.engine.execution_options(isolation_level=isolation)
    with ThreadPoolExecutor(1) as thread, store.engine.connect() as newest:
        begun = threading.Event()
        written = threading.Event()

        def come_late():
            with stale.begin() as connection:
                if begin is not None:
                    connection.execute(begin)
                begun.set()
                written.wait(60)
                return write(connection, setting("open", 7), OLD)

        late = thread.submit(come_late)
        assert begun.wait(60)
        with newest.begin():
            write(newest, setting("paid", 7), NEW)
            written.set()
            store.wait_until_somebody_waits()
        return late.exception(60) or late.result()


def test_a_stale_writer_that_waited_for_the_row_is_refused(postgresql):
    """It compares with what the newer one has committed meanwhile, not with what it saw."""
    postgresql.add(i7=OLD)
    refused = race(postgresql, fenced_update)
    assert isinstance(refused, StaleFence)
    assert refused.args == ("invoice", OLD, NEW)
    assert postgresql.states() == {7: ("paid", NEW)}


def test_a_stale_writer_without_a_fence_overwrites(postgresql):
    """The twin: it waits just as long, and then the newer one's write is lost."""
    postgresql.add(i7=OLD)
    assert race(postgresql, unfenced) == 1
    assert postgresql.states() == {7: ("open", OLD)}


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_is_refused_by_the_database_and_then_by_the_fence(postgresql, isolation):
    postgresql.add(i7=OLD)
    refused = race(postgresql, fenced_update, isolation=isolation, begin=select(INVOICE))
    assert isinstance(refused, OperationalError)
    assert "could not serialize" in str(refused)
    assert postgresql.states() == {7: ("paid", NEW)}
    again = postgresql.engine.execution_options(isolation_level=isolation)
    with pytest.raises(StaleFence), again.begin() as connection:
        fenced_update(connection, setting("open", 7), OLD)


@contextmanager
def holding(store, lock, fence):
    with store.engine.begin() as connection:
        raise_fence(connection, GUARD, lock, fence)
        yield connection


@pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (NEW, OLD)])
def test_two_that_make_the_same_guard_row_are_told_apart(postgresql, first, second):
    def come():
        with postgresql.engine.begin() as connection:
            raise_fence(connection, GUARD, "a", second)
            # The savepoint is over, and the transaction is still good for the write itself.
            connection.execute(insert(INVOICE).values(id=1, state="open"))

    with ThreadPoolExecutor(1) as thread:
        with holding(postgresql, "a", first):
            late = thread.submit(come)
            postgresql.wait_until_somebody_waits()
        error = late.exception(60)
    assert (error is None) == (second > first), error
    assert error is None or error.args == ("a", OLD, NEW)
    assert postgresql.guards() == {"a": NEW}
    assert len(postgresql.states()) == (second > first)


def test_a_guard_row_that_a_snapshot_cannot_see_fails_with_the_databases_error(postgresql):
    """Under REPEATABLE READ nobody can say whether that row is newer: begin again."""
    isolated = postgresql.engine.execution_options(isolation_level="REPEATABLE READ")
    with pytest.raises(IntegrityError), isolated.begin() as connection:
        connection.execute(select(INVOICE))  # the snapshot is taken
        with holding(postgresql, "a", OLD):
            pass
        raise_fence(connection, GUARD, "a", NEW)
    with isolated.begin() as connection:
        raise_fence(connection, GUARD, "a", NEW)
    assert postgresql.guards() == {"a": NEW}


def crowd(store, write):
    order = []
    fences = random.Random(9).sample(range(1, 1000), 40)
    store.add(i7=None)

    def come(fence):
        try:
            with store.engine.begin() as connection:
                write(connection, fence)
                order.append(fence)  # the row is locked, so this is the order of the writes
        except StaleFence as stale:
            return stale.newest > fence
        return None

    with ThreadPoolExecutor(8) as threads:
        refused = list(threads.map(come, fences))
    assert all(known in (None, True) for known in refused)
    assert len(order) == refused.count(None)
    return order, max(fences)


def by_column(connection, fence):
    fenced_update(connection, setting(f"by {fence}", 7), fence)


def by_guard(connection, fence):
    raise_fence(connection, GUARD, "a", fence)
    connection.execute(setting(f"by {fence}", 7))


@pytest.mark.parametrize("write", [by_column, by_guard])
def test_a_crowd_writes_in_the_order_of_its_fences(store, write):
    order, largest = crowd(store, write)
    assert order == sorted(order)
    assert order[-1] == largest
    assert store.states()[7][0] == f"by {largest}"


def test_a_crowd_without_fences_does_not(postgresql):
    """The twin: whoever comes last is last."""
    order, _ = crowd(postgresql, lambda connection, fence: connection.execute(setting("", 7)))
    assert len(order) == 40
    assert order != sorted(order)


def test_one_of_many_inserts_at_a_time_under_a_guard(postgresql):
    """Look, count, insert: with one holder's number for all, the guard row makes them a line."""
    limit, everybody = 3, threading.Barrier(5, timeout=60)

    def come(number):
        everybody.wait()
        with postgresql.engine.begin() as connection:
            raise_fence(connection, GUARD, "customer:1", NEW)
            if connection.execute(select(func.count()).select_from(INVOICE)).scalar() < limit:
                connection.execute(insert(INVOICE).values(id=number, state="open"))

    with ThreadPoolExecutor(5) as threads:
        list(threads.map(come, range(5)))
    assert len(postgresql.states()) == limit


# -- Redis ---------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["bytes", "text"])
def client(request, contract_node):
    with redis.Redis.from_url(contract_node.url, decode_responses=request.param) as client:
        yield client


def test_the_newest_holder_sets_and_an_older_one_does_not(client):
    for fence in (OLD, OLD, NEW, NEW):
        fenced_set(client, "stock", f"by {fence}", fence)
    with pytest.raises(StaleFence) as stale:
        fenced_set(client, "stock", "late", OLD)
    assert stale.value.args == ("stock", OLD, NEW)
    assert client.get("stock") in (f"by {NEW}", f"by {NEW}".encode())
    assert int(client.get(fence_key("stock"))) == NEW
    assert client.ttl("stock") == client.ttl(fence_key("stock")) == -1


@pytest.mark.parametrize("fence", [1, 9, 2**31, 10**15 - 1, 2**53 - 1])
def test_redis_compares_neighbours_exactly(client, fence):
    fenced_set(client, "stock", "new", fence + 1)
    with pytest.raises(StaleFence):
        fenced_set(client, "stock", "late", fence)
    fenced_set(client, "stock", "own", fence + 1)


def test_the_fence_outlives_its_value(client):
    """A value that has expired or was deleted is not set by a stale holder either."""
    fenced_set(client, "stock", "new", NEW, ttl=0.05, remember=600)
    eventually(lambda: not client.exists("stock"), "end of the value")
    assert 500_000 < client.pttl(fence_key("stock")) <= 600_050
    with pytest.raises(StaleFence):
        fenced_set(client, "stock", "late", OLD)
    assert not client.exists("stock")


def test_a_fence_key_that_holds_something_else_is_an_error(client):
    """It fails, rather than to take it for no fence."""
    client.set(fence_key("stock"), "not a number")
    with pytest.raises(redis.ResponseError, match=r"no fence is stored at fence:\{stock\}"):
        fenced_set(client, "stock", "new", NEW)
    assert not client.exists("stock")


def test_both_keys_are_in_one_slot_of_a_cluster(redis_nodes):
    """A cluster refuses a script whose keys are in two slots."""
    (node,) = redis_nodes(1, extra_args=in_cluster_mode())
    with redis.Redis.from_url(node.url) as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        eventually(
            lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"), "a cluster"
        )
        for key in ("stock", "{shop}:stock", "a:{shop}:stock"):
            fenced_set(client, key, "new", NEW)
            with pytest.raises(StaleFence):
                fenced_set(client, key, "late", OLD)


def test_a_crowd_sets_in_the_order_of_its_fences(client):
    fences = random.Random(7).sample(range(1, 10**6), 200)

    def come(fence):
        try:
            fenced_set(client, "stock", fence, fence)
        except StaleFence as stale:
            return stale.newest > fence
        return None

    with ThreadPoolExecutor(8) as threads:
        assert False not in list(threads.map(come, fences))
    assert int(client.get("stock")) == max(fences)
