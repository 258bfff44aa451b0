"""A database as the lock node: ends of processes, forks, poolers, and a server that hangs."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack, closing, nullcontext, suppress
from pathlib import Path

import psycopg
import pytest

from celery_redlock import LockTaken, QuorumUnavailable, Redlock
from celery_redlock.lock.database import batch, postgresql, sqlite
from celery_redlock.lock.database import server as server_module
from celery_redlock.lock.database.store import Busy
from celery_redlock.lock.nodes import fanout
from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.nodes.guard import Unfit
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import check, probe
from celery_redlock.reading.nodes import bootstrap
from support.machine import found
from support.pgbouncer import find_pgbouncer, pooled
from support.postgres import DURABLE, USER, find_postgres, postgres
from support.waiting import eventually

RULES = Rules(ttl=60, max_ttl=60, node_timeout=20.0)
#: How often a process ends with a release that it has only told.
TRIES = 10

TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def url(database_url):
    return database_url


@pytest.fixture
def locks_on(monkeypatch):
    # Or one in sixteen looks for what has expired just when a test swaps its file, and hangs up.
    monkeypatch.setattr(batch, "SWEEP_EVERY", 10**9)
    with ExitStack() as stack:

        def on(url, **settings):
            rules = Rules(**{"ttl": 60, "max_ttl": 60, "node_timeout": 20.0, **settings})
            address_of(url).make_tables()
            enrolled = {"enrolled"}  # not at the first try, where the machine stood still
            eventually(lambda: {*bootstrap([url], rules).values()} == enrolled, "enrolment")
            return stack.enter_context(closing(Redlock([url], rules)))

        yield on


# -- the end of a process --------------------------------------------------------------

SCRIPT = """
import multiprocessing, os, signal, sys, threading, time
from celery_redlock import Redlock
from celery_redlock.lock.database import server  # it says what is to be done at the end
from celery_redlock.lock.nodes import connections
from celery_redlock.lock.rules import Rules
from celery_redlock.process import ending
from support.database_server import patient
connections.FIRST_CONNECT = 20.0
server.GRACE = 60  # a slow machine has not settled in two seconds
patience = patient(60)  # kept: what it changes is changed back when it is gone
patience.__enter__()
is_told, answer = threading.Event(), server.Server._answer

def slowly(self, commands):
    if is_told.is_set():  # so that who does not wait for a release is sure to lose it
        time.sleep(0.2)
    answer(self, commands)

server.Server._answer = slowly
if {is_off}:
    ending._calls.clear()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
locks = Redlock([{url!r}], Rules(ttl=60, max_ttl=60, node_timeout=10.0))

def work(numbers=range(20)):
    leases = [locks.acquire(f"n{{i}}", wait=60.0) for i in numbers]
    is_told.set()
    for lease in leases:
        locks.release(lease, wait=False)

{end}
"""
THREADS = "several = [threading.Thread(target=work, args=([i],)) for i in range(20)]"
#: How a process may end -> its last lines.
ENDS = {
    "its last line": "work()",
    "sys.exit": "work(); sys.exit()",
    "SIGTERM": "work(); os.kill(os.getpid(), signal.SIGTERM)",
    "threads": THREADS + "\nfor one in several: one.start()",
    "a child of multiprocessing": (
        "child = multiprocessing.get_context('fork').Process(target=work)\nchild.start()\n"
        "child.join()"
    ),
    "os._exit after close": "work(); locks.close(); os._exit(0)",
}


def left_by(url, end, *, is_off=False):
    """Return how many locks of twenty are left by a process that ends so."""
    script = textwrap.dedent(SCRIPT.format(url=url, end=ENDS[end], is_off=is_off))
    env = {**os.environ, "PYTHONPATH": TESTS}
    done = subprocess.run([sys.executable, "-c", script], env=env, check=False, timeout=120)
    assert done.returncode == 0
    with closing(Redlock([url], RULES)) as looks:
        eventually(lambda: check(looks) == {}, "a connection")
        return sum(bool(looks.inspect(f"n{number}")[0].holder) for number in range(20))


@pytest.mark.parametrize("end", ENDS)
def test_releases_that_were_only_told_arrive_before_the_process_ends(url, locks_on, end):
    locks_on(url)
    assert left_by(url, end) == 0


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_does_not_settle_loses_releases(locks_on, database, end):
    locks_on(database.url)
    assert any(left_by(database.url, end, is_off=True) for _ in range(TRIES))


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


FORKED = """
import gc, os, sys
from celery_redlock import LockTaken, Redlock
from celery_redlock.lock.database import postgresql, sqlite
from celery_redlock.lock.nodes import connections
from celery_redlock.lock.rules import Rules
from support.waiting import eventually
connections.FIRST_CONNECT = 20.0
locks = Redlock([{url!r}], Rules(ttl=60, max_ttl=60, node_timeout=20.0))
locks.release(locks.acquire("n"))
files = list(sqlite._every_file)
if {is_off}:
    sqlite._every_file.clear()
(asks, asked), (tells, told) = os.pipe(), os.pipe()
if os.fork() == 0:
    try:
        locks.release(locks.acquire("n"))
        os.write(told, b"-")
        os.read(asks, 1)
        locks.acquire("n")
    finally:
        os.write(told, b"-")
    os.read(asks, 1)
    os._exit(0)
os.read(tells, 1)
locks.close()
del locks
gc.collect()
eventually(lambda: all(file._connection is None for file in files), "end of all use")
os.write(asked, b"-")
os.read(tells, 1)
other = Redlock([{url!r}], Rules(ttl=60, max_ttl=60, node_timeout=20.0))
try:
    other.acquire("n")
except LockTaken:
    sys.exit(0)
finally:
    os.write(asked, b"-")
sys.exit(3)
"""


@pytest.mark.parametrize("is_off", [False, True])
def test_what_a_child_holds_in_a_file_is_seen_once_its_parent_has_let_go_of_it(
    tmp_path, locks_on, is_off
):
    """Or, with files that stay open, is lost: SQLite deletes the log to which the child writes."""
    url = f"sqlite:///{tmp_path}/locks.sqlite"
    locks_on(url).close()
    script = textwrap.dedent(FORKED.format(url=url, is_off=is_off))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": TESTS},
        check=False,
        timeout=120,
    )
    assert done.returncode == (3 if is_off else 0)


GENERATIONS = """
import os, sys
from celery_redlock import Redlock
from celery_redlock.lock.database import server
from celery_redlock.lock.nodes import connections
from celery_redlock.lock.rules import Rules
connections.FIRST_CONNECT = 20.0
locks = Redlock([{url!r}], Rules(ttl=60, max_ttl=60, node_timeout=20.0))
locks.release(locks.acquire("n"))
if {is_off}:
    server._every_server = {{*server._every_server}}  # from which nothing is gone

def in_child(body):
    pid = os.fork()
    if pid == 0:
        code = 9
        try:
            code = body()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def child():
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]
    return in_child(lambda: 3 * any(not is_open(one) for one in opened))

def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True

sys.exit(in_child(child))
"""


def generations(url, *, is_off=False):
    script = textwrap.dedent(GENERATIONS.format(url=url, is_off=is_off))
    return subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode


def test_a_grandchild_keeps_what_its_parent_has_opened(url, locks_on):
    locks_on(url).close()
    assert generations(url) == 0


def test_a_connection_that_a_child_lets_go_of_again_costs_a_grandchild_another(database, locks_on):
    """A file that the child has opened meanwhile has the number that the connection had."""
    locks_on(database.url).close()
    assert generations(database.url, is_off=True) == 3


TAKES = """
import sys
from celery_redlock import LockTaken, Redlock
from celery_redlock.lock.nodes import connections
from celery_redlock.lock.rules import Rules
connections.FIRST_CONNECT = 20.0
try:
    Redlock([{url!r}], Rules(ttl=60, max_ttl=60, node_timeout=20.0)).acquire("n")
except LockTaken:
    sys.exit(3)
"""


def takes(url):
    script = textwrap.dedent(TAKES.format(url=url))
    code = subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode
    return {0: True, 3: False}[code]


def without_log(tmp_path, locks_on, way="locks.sqlite"):
    """Return a lock on a file whose log of writes was deleted under it, and the file's URL."""
    file, named = tmp_path / "locks.sqlite", tmp_path / way
    if named != file:
        named.symlink_to(file)
    url = f"sqlite:///{named}"
    locks = locks_on(url)
    locks.release(locks.acquire("n"))
    with closing(sqlite3.connect(file)) as connection:  # or its enrolment may be in the log alone
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    Path(f"{file}-wal").unlink()
    Path(f"{file}-shm").unlink()
    return locks, url


@pytest.mark.parametrize("way", ["locks.sqlite", "link.sqlite"])
def test_a_file_whose_log_was_deleted_grants_nothing_that_others_do_not_see(
    tmp_path, locks_on, way
):
    locks, url = without_log(tmp_path, locks_on, way)
    with pytest.raises(QuorumUnavailable, match="-wal was deleted"):
        locks.acquire("n")
    eventually(lambda: granted(locks, "other"), "a grant of a file that was opened anew")
    locks.acquire("n")
    assert not takes(url)


def test_a_file_that_is_mounted_without_its_folder_is_refused(tmp_path, monkeypatch):
    """In each container its log would be another one."""
    file, mounts = tmp_path / "my locks.sqlite", tmp_path / "mountinfo"
    monkeypatch.setattr(sqlite, "MOUNTS", mounts)
    place = str(file.resolve()).replace(" ", "\\040")
    mounts.write_text(f"29 1 8:1 / {tmp_path} rw - ext4 /dev/sda rw\n")
    address = address_of(f"sqlite:///{file}")
    address.store().close()
    mounts.write_text(f"29 1 8:1 /locks.db {place} rw - ext4 /dev/sda rw\n")
    with pytest.raises(Unfit, match="mount its folder"):
        address.store()


def test_a_link_that_leads_to_another_file_is_noticed(tmp_path, locks_on):
    link = tmp_path / "link.sqlite"
    link.symlink_to(tmp_path / "one.sqlite")
    locks = locks_on(f"sqlite:///{link}")
    locks.release(locks.acquire("n"))
    link.unlink()
    link.symlink_to(tmp_path / "other.sqlite")
    with pytest.raises(QuorumUnavailable, match="is not there any more"):
        locks.acquire("n")


def test_a_log_that_nobody_looks_after_costs_locks(tmp_path, locks_on, monkeypatch):
    monkeypatch.setattr(sqlite.Sqlite, "_check_log", lambda _: None)
    locks, url = without_log(tmp_path, locks_on)
    locks.acquire("n")
    assert takes(url)


def test_the_threads_of_dropped_connections_end(url, locks_on):
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
    locks.acquire("before", wait=60)  # may be late at first
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
    except (QuorumUnavailable, LockTaken):  # by a try of ours that was late, until it is undone
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


@pytest.fixture
def backends(database):
    """What is asked of PostgreSQL past the locks, and how: ``backends(statement)``."""
    with psycopg.connect(database.url.replace("+psycopg", ""), autocommit=True) as connection:

        def ask(statement):
            return connection.execute(statement).fetchall()

        yield ask


#: Which connections are those of locks.
OURS = "datname = current_database() AND application_name = 'celery-redlock'"


def serving():
    return [one for one in threading.enumerate() if one.name == "redlock-database"]


def cut_off(backends):
    """Have the server end all idle connections of locks, and wait until that has been noticed."""
    backends(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OURS}")
    eventually(lambda: not serving(), "end of the threads")


def test_an_idle_connection_that_the_server_ends_costs_no_request(
    database, backends, locks_on, monkeypatch
):
    monkeypatch.setattr(fanout, "QUIET", 0.0)  # else a second has to pass before it is looked
    locks = locks_on(database.url)
    held = locks.acquire("held")
    cut_off(backends)
    assert granted(locks, "n")
    cut_off(backends)
    assert locks.extend(held)
    cut_off(backends)
    assert locks.release(held).name == "RELEASED"


def test_an_idle_connection_that_nobody_looks_after_costs_a_request(
    database, backends, locks_on, monkeypatch
):
    monkeypatch.setattr(fanout, "QUIET", 0.0)
    monkeypatch.setattr(postgresql.Postgres, "fileno", lambda _: -1)
    locks = locks_on(database.url)
    locks.acquire("held")
    assert backends(f"SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE {OURS}")
    with pytest.raises(QuorumUnavailable):
        locks.acquire("n")


def test_what_a_server_says_to_an_idle_connection_does_not_end_it(database, backends, monkeypatch):
    """A pooler may give us a connection that listens for somebody else."""
    heard = []
    hear = postgresql.Postgres.heard
    monkeypatch.setattr(postgresql.Postgres, "heard", lambda store: heard.append(hear(store)))
    address_of(database.url).make_tables()
    store = address_of(database.url).store()
    store._connection.execute("LISTEN others")
    ours, theirs = socket.socketpair()
    server_module.Server(theirs, ours, store).start()
    with closing(ours):
        backends("SELECT pg_notify('others', '00')")
        eventually(lambda: [b"\0"] in heard, "what is told")
        ours.sendall(b"*1\r\n$4\r\nPING\r\n")
        assert ours.recv(100) == b"$4\r\nPONG\r\n"
        assert len(heard) < 10


@pytest.mark.parametrize("option", ["", "?commit=async"])
def test_a_crash_quarantines_where_commits_may_be_lost(own_server, locks_on, option):
    server, url = own_server
    joined = url + option.replace("?", "&" if "?" in url else "?")
    locks = locks_on(joined)
    locks.release(locks.acquire("n"))
    server.kill()
    server.start()
    states = ("up", "quarantined")
    found = eventually(
        lambda: state if (state := probe(locks)[0].state) in states else None, "way to the server"
    )
    assert found == states[bool(option)]


def now_without_a_look(store, ident, stamped, now=postgresql.Postgres.now):
    return now(store, re.sub(r"\(SELECT id.*\)", f"'{ident}'", stamped))


@pytest.mark.long
@pytest.mark.parametrize("is_off", [False, True])
def test_a_crash_is_noticed_behind_a_pooler_where_it_loses_commits(locks_on, monkeypatch, is_off):
    """
    One process of the server dies, and all others with it, but for its own one.

    The pooler connects anew, and its clients notice nothing. Without a look at what a crash
    empties, the second of two is granted what the first one holds.
    """
    late = {**DURABLE, "wal_writer_delay": "10s"}  # else most commits are on the disk by then
    with ExitStack() as stack:
        server = stack.enter_context(postgres(found(find_postgres), late))
        database = stack.enter_context(server.database())
        pool = stack.enter_context(pooled(found(find_pgbouncer), database))
        first, second = (locks_on(f"{pool}?commit=async") for _ in range(2))
        for locks in (first, second):
            locks.release(locks.acquire("warm"))
        where = database.url.replace("+psycopg", "")
        with psycopg.connect(where, autocommit=True) as connection:
            (ident,) = connection.execute("SELECT id FROM celery_redlock_crash").fetchone()
            connection.execute("CHECKPOINT")
        if is_off:
            blind = functools.partialmethod(now_without_a_look, ident)
            monkeypatch.setattr(postgresql.Postgres, "now", blind)
        first.acquire("n")
        os.kill(server.children(database.name)[0], signal.SIGKILL)
        eventually(lambda: "reinitializing" in server.log(), "end of all others")
        told = eventually(
            lambda: state if (state := probe(second)[0].state) in ("up", "quarantined") else 0,
            "way to the server",
        )
        assert told == ("up" if is_off else "quarantined")
        assert granted(second, "n") is is_off


@pytest.mark.usefixtures("usual_limits")
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


@pytest.mark.usefixtures("usual_limits")
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


@pytest.fixture
def crowded(database):
    """A connection that has the only one of a pooler in session mode."""
    address_of(database.url).make_tables()
    with pooled(found(find_pgbouncer), database, 1, "session") as url:
        store = address_of(url).store()
        yield store
        store.close()


@pytest.mark.usefixtures("usual_limits")
@pytest.mark.long
def test_a_pooler_without_a_connection_for_the_test_of_hints_has_none(crowded):
    assert not crowded.listen(b"channel")


@pytest.mark.usefixtures("usual_limits")
@pytest.mark.long
def test_without_a_limit_the_test_of_hints_waits_as_long_as_the_pooler(crowded, monkeypatch):
    monkeypatch.setattr(postgresql, "in_time", lambda *_: nullcontext())

    def listen():
        with suppress(server_module.Broken, psycopg.Error):
            crowded.listen(b"channel")

    listens = threading.Thread(target=listen)
    listens.start()
    listens.join(4)  # short: it is to wait still, also on a slow machine
    assert listens.is_alive()
    crowded.close()  # whose connection is free for it then
    listens.join(60)


@pytest.mark.long
def test_a_pooler_in_statement_mode_is_refused(database):
    address_of(database.url).make_tables()
    pool = pooled(found(find_pgbouncer), database, mode="statement")
    with pool as url, pytest.raises(Unfit, match="pooler in statement mode"):
        address_of(url).store()


def ears_of(database):
    with psycopg.connect(database.url.replace("+psycopg", "")) as connection:
        table = "celery_redlock"
        found = connection.execute(
            f"SELECT value FROM {table} WHERE substr(key, 1, 6) = '\\x00656172733a'::bytea"
        ).fetchall()
        return [(bytes(value),) for (value,) in found]


def test_a_lack_of_rights_is_known_in_any_language():
    lack = postgresql.errors.InsufficientPrivilege("keine Berechtigung für Schema public")
    assert postgresql.words_of(lack).startswith("permission denied: keine")
    assert postgresql.words_of(type(lack)("permission denied for x")) == "permission denied for x"


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


@pytest.mark.usefixtures("usual_limits")
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
        assert store.sent("SHOW synchronous_commit") == [[("off",)]]  # the tests' server is fast
        store.begin([b"k"], [])
        assert store.run("SHOW synchronous_commit") == [[(expected,)]]


# -- what a user, or a pooler, has set otherwise ------------------------------------------

ODD = [
    "default_transaction_read_only=on",
    "default_transaction_isolation=serializable",
    "standard_conforming_strings=off",
    "statement_timeout=50",
    "extra_float_digits=-10",
    "bytea_output=escape",
    "client_encoding=SQL_ASCII",
]


def with_setting(database, setting):
    return f"{database.url}&options=-c%20{setting.replace('=', '%3D')}"


@pytest.mark.parametrize("setting", ODD)
def test_locks_are_granted_and_waited_for_whatever_the_user_has_set(database, locks_on, setting):
    locks = locks_on(with_setting(database, setting))
    held = locks.acquire("n")
    with pytest.raises(LockTaken):
        locks.acquire("n")
    waiter = threading.Thread(target=lambda: locks.release(locks.acquire("n", wait=60)))
    waiter.start()
    eventually(lambda: ears_of(database) == [(b"hear",)], "somebody who is told")
    locks.release(held)
    waiter.join(60)
    assert granted(locks, "n")


@pytest.mark.parametrize(
    ("setting", "statement"),
    [
        ("default_transaction_read_only=on", "DELETE FROM celery_redlock"),
        ("standard_conforming_strings=off", "SELECT '\\x00'::bytea"),
        ("statement_timeout=50", "SELECT pg_sleep(1)"),
    ],
)
def test_what_a_user_has_set_does_harm_to_statements_alone(database, setting, statement):
    address = address_of(with_setting(database, setting))
    address.make_tables()
    with closing(address.store()) as store, pytest.raises(server_module.Broken):
        store.sent(statement)


@pytest.fixture
def locked(database):
    """A database whose table of locks somebody else has for long, as for a VACUUM FULL."""
    address = address_of(database.url)
    address.make_tables()
    with psycopg.connect(database.url.replace("+psycopg", "")) as connection:
        connection.execute("LOCK TABLE celery_redlock")
        yield address


@pytest.mark.usefixtures("usual_limits")
def test_nobody_waits_for_good_for_a_table_that_others_have(locked):
    with pytest.raises(Busy, match="lock timeout"):
        locked.store()


@pytest.mark.usefixtures("usual_limits")
def test_without_limits_a_connection_waits_as_long_as_the_others_have_it(locked, monkeypatch):
    monkeypatch.setattr(postgresql, "LIMITS", ())
    monkeypatch.setattr(postgresql, "LONGEST", 60.0)  # or it may hang up before it is looked at

    def connect():
        with suppress(server_module.Broken):  # the database is dropped, perhaps before it is done
            locked.store().close()

    connects = threading.Thread(target=connect)
    connects.start()
    connects.join(3)  # short: it is to wait still, also on a slow machine
    assert connects.is_alive()


@pytest.mark.usefixtures("usual_limits")
def test_who_is_connected_but_gets_no_answer_hangs_up(locked, monkeypatch):
    """As through a pooler whose database hangs; the twin is the test before this one."""
    monkeypatch.setattr(postgresql, "LIMITS", ())
    monkeypatch.setattr(postgresql, "LONGEST", 1.0)
    with pytest.raises(server_module.Broken, match="has not answered for 1 s"):
        locked.store()


@pytest.mark.usefixtures("usual_limits")
@pytest.mark.long
@pytest.mark.parametrize("is_off", [False, True])
def test_the_search_path_that_another_client_of_a_pooler_leaves_is_not_ours(
    database, monkeypatch, is_off
):
    if is_off:
        limits = tuple(one for one in postgresql.LIMITS if "search_path" not in one)
        monkeypatch.setattr(postgresql, "LIMITS", limits)
    for option in ("", "&schema=tenant"):
        address_of(database.url + option).make_tables()
    with (
        pooled(found(find_pgbouncer), database, 1) as pool,
        closing(address_of(pool).store()) as store,
    ):
        with psycopg.connect(pool, autocommit=True, prepare_threshold=None) as another:
            another.execute("SET search_path TO tenant")
        asked = f"SELECT '{store.table}'::regclass = 'public.celery_redlock'::regclass"
        assert (store.run(asked) == [[(True,)]]) is not is_off
