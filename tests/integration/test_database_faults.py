"""A database as the lock node: ends of processes, forks, poolers, and a server that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack, closing

import psycopg
import pytest

from celery_redlock import LockTaken, QuorumUnavailable, Redlock
from celery_redlock.lock.database import server as server_module
from celery_redlock.lock.database.store import Busy
from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import check, probe
from celery_redlock.reading.nodes import bootstrap
from support.machine import found
from support.pgbouncer import find_pgbouncer, pooled
from support.postgres import DURABLE, USER, find_postgres, postgres
from support.waiting import eventually

RULES = Rules(ttl=60, max_ttl=60, node_timeout=2.0)
#: How often a process ends with a release that it has only told.
ENDS = 10

KINDS = ["postgresql", "sqlite"]


@pytest.fixture(params=KINDS)
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/locks.sqlite"
    return request.getfixturevalue("database").url


@pytest.fixture
def locks_on():
    with ExitStack() as stack:

        def on(url, **settings):
            rules = Rules(**{"ttl": 60, "max_ttl": 60, "node_timeout": 2.0, **settings})
            address_of(url).make_tables()
            bootstrap([url], rules)
            return stack.enter_context(closing(Redlock([url], rules)))

        yield on


# -- the end of a process --------------------------------------------------------------

SCRIPT = """
import os, signal, sys
from celery_redlock import Redlock
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.database import server
from celery_redlock.lock.rules import Rules
if {is_off}:
    from celery_redlock.process import ending
    ending._calls.clear()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
locks = Redlock([{url!r}], Rules(ttl=60, max_ttl=60, node_timeout=2.0))
held = [locks.take(LockRequest(f"n{{i}}", 60.0)) for i in range(20)]
for one in held:
    locks.give_back(one)
{end}
"""


def left_by(url, end, *, is_off=False):
    """Return how many locks are left by a process that ends so."""
    script = textwrap.dedent(SCRIPT.format(url=url, end=end, is_off=is_off))
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=120)
    assert done.returncode == 0
    with closing(Redlock([url], RULES)) as looks:
        return sum(bool(looks.inspect(f"n{number}")[0].holder) for number in range(20))


@pytest.mark.parametrize("end", ["sys.exit()", "os.kill(os.getpid(), signal.SIGTERM)", "pass"])
def test_releases_that_were_only_told_arrive_before_the_process_ends(url, locks_on, end):
    locks_on(url)
    assert [left_by(url, end) for _ in range(2)] == [0, 0]


def test_a_process_that_does_not_settle_loses_releases(locks_on, database):
    locks_on(database.url)
    assert any(left_by(database.url, "sys.exit()", is_off=True) for _ in range(ENDS))


# -- forks -----------------------------------------------------------------------------


def test_a_child_has_connections_of_its_own(url, locks_on):
    locks = locks_on(url)
    mine = locks.acquire("parent")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(LockTaken):
                locks.acquire("parent")
            locks.release(locks.acquire("child"))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert locks.extend(mine)
    assert locks.release(mine).name == "RELEASED"


def test_the_threads_of_dropped_connections_end(url, locks_on):
    def serving():
        return [one for one in threading.enumerate() if one.name == "redlock-database"]

    before = len(serving())
    for _ in range(3):
        locks = locks_on(url)
        locks.release(locks.acquire("n"))
        locks.close()
    eventually(lambda: len(serving()) <= before, "end of the threads")


# -- a server that hangs, ends, or comes later -----------------------------------------


@pytest.fixture
def own_server():
    with postgres(found(find_postgres), DURABLE) as server, server.database() as database:
        yield server, database.url


def test_a_server_that_hangs_is_given_up_and_found_again(own_server, locks_on):
    server, url = own_server
    locks = locks_on(url, node_timeout=0.5)
    locks.release(locks.acquire("n"))
    server.pause()
    try:
        with pytest.raises(QuorumUnavailable):
            locks.acquire("n")
        time.sleep(3.0)  # longer than a connection is kept that owes an answer
    finally:
        server.resume()
    eventually(lambda: granted(locks, "n"), "a grant of a server that goes on")


def granted(locks, name):
    try:
        return locks.release(locks.acquire(name)).name == "RELEASED"
    except QuorumUnavailable:
        return False


def test_what_is_committed_outlives_a_killed_server_without_a_quarantine(own_server, locks_on):
    server, url = own_server
    locks = locks_on(url)
    held = locks.acquire("held")
    server.kill()
    with pytest.raises(QuorumUnavailable):
        locks.acquire("other")
    server.start()
    waiting = 20  # short: there is no quarantine, which is a minute
    eventually(lambda: granted(locks, "other"), "a grant after the start", timeout=waiting)
    with pytest.raises(LockTaken):
        locks.acquire("held")
    assert locks.release(locks.extend(held)).name == "RELEASED"


@pytest.mark.parametrize("option", ["", "?commit=async"])
def test_a_crash_quarantines_where_commits_may_be_lost(own_server, locks_on, option):
    server, url = own_server
    joined = url + option.replace("?", "&" if "?" in url else "?")
    locks = locks_on(joined)
    locks.release(locks.acquire("n"))
    server.kill()
    server.start()
    states = ("up", "quarantined")
    eventually(lambda: probe(locks)[0].state in states, "way to the server")
    assert probe(locks)[0].state == states[bool(option)]


def test_a_client_stopped_amid_a_transaction_holds_nobody_up_for_long(own_server, locks_on):
    """Its transaction is ended by the server, which frees the names that it had locked."""
    _, url = own_server
    locks = locks_on(url)
    store = address_of(url).store()
    store.begin([b"redlock:lock:n"], [])
    eventually(lambda: granted(locks, "n"), "a grant")
    with pytest.raises(server_module.Broken):
        store.read([])
    store.close()


# -- a pooler --------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("option", ["", "?wake=poll"])
def test_a_pooler_in_transaction_mode_is_found_out(database, locks_on, option):
    with pooled(found(find_pgbouncer), database) as pool:
        through, direct = locks_on(pool + option), locks_on(database.url)
        held = direct.acquire("n")
        waited = []

        def wait():
            one = through.acquire("n", wait=60)
            waited.append(time.monotonic())
            through.release(one)

        waiter = threading.Thread(target=wait)
        waiter.start()
        eventually(lambda: ears_of(database), "somebody who looks for hints")
        assert ears_of(database) == [(b"poll",)]
        direct.release(held)
        waiter.join(60)
        assert waited
        for number in range(20):
            through.release(through.acquire(f"n{number}"))


def ears_of(database):
    with psycopg.connect(database.url.replace("+psycopg", "")) as connection:
        table = "celery_redlock"
        found = connection.execute(
            f"SELECT value FROM {table} WHERE substr(key, 1, 6) = '\\x00656172733a'::bytea"
        ).fetchall()
        return [(bytes(value),) for (value,) in found]


def test_a_url_says_nothing_of_its_password(own_server):
    server, _ = own_server
    bad = f"postgresql://{USER}:s3cret-word@127.0.0.1:9/none"
    with closing(Redlock([bad], RULES)) as locks:
        with pytest.raises(QuorumUnavailable) as raised:
            locks.acquire("n")
        texts = [str(raised.value), repr(locks), str(check(locks)), repr(address_of(bad))]
        assert not [text for text in texts if "s3cret" in text]
    assert server.children()


# -- what each transaction sees to -----------------------------------------------------


@pytest.fixture
def stores(database):
    """Two connections to one PostgreSQL with our tables."""
    address = address_of(database.url)
    address.make_tables()
    with ExitStack() as stack:
        yield [stack.enter_context(closing(address.store())) for _ in range(2)]


@pytest.mark.parametrize(
    ("mine", "theirs", "is_free"),
    [
        (([b"k"], []), ([b"k"], []), False),
        (([b"k"], []), ([], [b"k"]), False),
        (([], [b"k"]), ([b"k"], []), False),
        (([], [b"k"]), ([], [b"k"]), True),
        (([b"k"], []), ([b"other"], []), True),
    ],
)
def test_who_writes_a_key_has_it_alone(stores, mine, theirs, is_free):
    one, other = stores
    one.begin(*mine)
    one.run("SET LOCAL idle_in_transaction_session_timeout = 0")  # or the server ends it as soon
    if is_free:
        other.begin(*theirs)
    else:
        with pytest.raises(Busy):
            other.begin(*theirs)


def test_a_connection_notices_that_the_table_is_another_one(stores):
    one, other = stores
    one.read([])
    other.run(f"TRUNCATE {other.table}")
    with pytest.raises(server_module.Broken, match="another"):
        one.read([])


@pytest.mark.parametrize(("option", "expected"), [("", "on"), ("commit=async", "off")])
def test_commits_are_as_durable_as_the_url_says_whatever_the_server_does(
    database, option, expected
):
    address = address_of(f"{database.url}&{option}")
    address.make_tables()
    with closing(address.store()) as store:
        assert store.run("SHOW synchronous_commit") == [[("off",)]]  # the tests' server is fast
        store.begin([b"k"], [])
        assert store.run("SHOW synchronous_commit") == [[(expected,)]]
