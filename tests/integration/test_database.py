"""
A database as the lock node, as those who use it see it.

What providers of ShedLock have to keep is told again here: one holder of many, who lets go or
whose lease ends; by the database's clock, and released by its owner alone.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from celery_redlock.errors import LockTaken, RedlockError
from celery_redlock.lock.algorithm.results import ReleaseOutcome
from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import check
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.unique.requests import Trigger
from celery_redlock.unique.reservations import Reservations
from celery_redlock.unique.reserving import Duplicate
from support.kinds import POSTGRESQL, each
from support.stored import RENEWED, ROOMY
from support.waiting import eventually

#: No transaction is late on a busy machine.
PATIENT = {"ttl": 60.0, "max_ttl": 60.0, "node_timeout": 20.0}
#: How long somebody waits for a lock that is given back.
LONG = 60.0
TRIGGER = Trigger("n", 600.0, {"task_id": "first"}, 600.0)
on_postgresql = pytest.mark.parametrize("database_kind", each(POSTGRESQL), indirect=True)


@pytest.fixture
def url(database_url):
    return database_url


@pytest.fixture
def made(url):
    address_of(url).make_tables()
    return url


@pytest.fixture
def lock(made, locks):
    return locks([SimpleNamespace(url=made)], **PATIENT)


@pytest.fixture
def other(made, locks):
    """Another client of the same database."""
    return locks([SimpleNamespace(url=made)], bootstrap=False, **PATIENT)


def test_one_has_the_lock_until_it_is_released(lock, other):
    lease = lock.acquire("n")
    with pytest.raises(LockTaken) as taken:
        other.acquire("n")
    assert taken.value.holder["token"] == lease.token[:8]
    assert other.acquire("another")
    assert lock.release(lease) is ReleaseOutcome.RELEASED
    assert other.acquire("n").fence > lease.fence


def test_one_at_most_of_many_threads(lock):
    inside, most, done = [], [], []

    def work():
        for _ in range(5):
            with lock.hold("n", wait=LONG):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.002)  # stands in for work
                inside.pop()
                done.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 30
    assert set(most) == {1}


def test_a_name_is_reserved_once_until_that_ends(lock, other):
    placed = Reservations.on(lock).reserve(TRIGGER)
    assert isinstance(Reservations.on(other).reserve(TRIGGER), Duplicate)
    Reservations.on(lock).end("n", placed.token, "over", wait=True)
    assert not isinstance(Reservations.on(other).reserve(TRIGGER), Duplicate)


HEAD = f"""
import os, sys, time
from celery_redlock.errors import LockTaken
from celery_redlock.lock.nodes import connections
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
connections.FIRST_CONNECT = 20.0
url, note = sys.argv[1:3]
lock = Redlock([url], Rules(**{PATIENT}))
"""


def program(code, made, note="-"):
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + code, made, str(note)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process):
    try:
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    return said


WORK = """
for _ in range(5):
    with lock.hold("n", wait=60.0) as held:
        with open(note, "a") as file:
            print("begin", os.getpid(), file=file, flush=True)
            time.sleep(0.002)
            print("end", os.getpid(), file=file, flush=True)
"""


def test_one_at_most_of_many_processes(lock, made, tmp_path):
    note = tmp_path / "note"
    processes = [program(WORK, made, note) for _ in range(3)]
    for process in processes:
        output_of(process)
    lines = [line.split() for line in Path(note).read_text().splitlines()]
    assert len(lines) == 30
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert (begin[0], end[0], begin[1]) == ("begin", "end", end[1])


def test_a_lease_ends_by_itself(made, locks):
    node = SimpleNamespace(url=made)
    first = locks([node], **ROOMY)  # so short a lease allows for no patience
    second, third = (locks([node], bootstrap=False, **PATIENT) for _ in range(2))
    began = time.monotonic()
    lease = first.acquire("n", ttl=RENEWED, wait=LONG)
    later = second.acquire("n", wait=LONG)
    assert time.monotonic() - began > RENEWED - 0.1
    assert later.fence > lease.fence
    assert first.release(lease) is not ReleaseOutcome.RELEASED
    with pytest.raises(LockTaken):
        third.acquire("n")


def test_a_lease_that_is_extended_ends_later(lock, other):
    lease = lock.acquire("n")
    eventually(lambda: other.inspect("n")[0].ttl < 58.0, "time that has passed")
    began = time.monotonic()
    lease = lock.extend(lease)
    (view,) = other.inspect("n")
    assert view.ttl + time.monotonic() - began >= 59.9
    assert view.holder["token"] == lease.token[:8]


def test_nobody_but_the_owner_releases(lock, other):
    lease = lock.acquire("n")
    assert other.release(replace(lease, token="b" * 40)) is not ReleaseOutcome.RELEASED
    with pytest.raises(LockTaken):
        other.acquire("n")
    assert lock.release(lease) is ReleaseOutcome.RELEASED


WRONG_CLOCK = """
true, true_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: true() + off, lambda: true_ns() + int(off * 1e9)
try:
    lock.acquire("n")
except LockTaken:
    print("taken")
lease = lock.acquire("m", ttl=60.0)
print(lease.fence > 0, 0 < lock.inspect("m")[0].ttl <= 60.0, flush=True)
os._exit(0)
"""


@on_postgresql
@pytest.mark.parametrize("off", [-86_400, 86_400])
def test_the_clock_is_that_of_the_database(lock, made, off):
    """That of whoever asks may be a day off; SQLite has no other than the machine's."""
    lease = lock.acquire("n")
    said = output_of(program(f"off = {off}\n" + WRONG_CLOCK, made))
    assert said.split() == ["taken", "True", "True"]
    assert lock.inspect("m")[0].ttl <= 60.0
    assert lock.release(lease) is ReleaseOutcome.RELEASED


@on_postgresql
def test_a_missing_table_is_told_with_the_command_that_makes_it(url, locks):
    lock = locks([SimpleNamespace(url=url)], bootstrap=False, **PATIENT)
    with pytest.raises(RedlockError, match="redlock init"):
        lock.acquire("n")
    with pytest.raises(RedlockError, match="redlock init"):
        check(lock)
    address_of(url).make_tables()
    bootstrap([url], Rules(**PATIENT))
    assert eventually(lambda: granted(lock), "the first lock")


def test_tables_are_made_once(made, lock):
    """Whoever makes them again changes nothing."""
    lease = lock.acquire("n")
    address_of(made).make_tables()
    assert lock.inspect("n")[0].holder["token"] == lease.token[:8]


def granted(lock, name="n"):
    try:
        return lock.acquire(name)
    except RedlockError:
        return None


def test_a_database_that_is_away_at_start_votes_once_it_is_back(
    url, tmp_path, database_kind, postgres_servers
):
    """SQLite: where the file's folder is mounted later."""
    if url.startswith("sqlite"):
        folder = tmp_path / "later"
        url = f"sqlite:///{folder}/locks.db"

        def come_back():
            folder.mkdir()

    else:
        name = url.partition("@/")[2].partition("?")[0]
        server = postgres_servers(database_kind)
        address_of(url).make_tables()
        server.do(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")

        def come_back():
            server.do(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")

    lock = Redlock([url], Rules(**PATIENT))
    try:
        assert set(check(lock)) == set(lock.labels)
        assert granted(lock) is None
        come_back()
        eventually(lambda: bootstrap([url], Rules(**PATIENT))[lock.labels[0]] == "enrolled", "it")
        assert eventually(lambda: granted(lock), "a vote")
    finally:
        lock.close()


FORK = """
from celery_redlock.lock.lease import Lease
lease = lock.acquire("n")
child = os.fork()
if child == 0:
    try:
        try:
            lock.acquire("n")
        except LockTaken:
            print("taken", flush=True)
        mine = lock.acquire("m")
        print(lock.release(mine).value, flush=True)
    finally:
        os._exit(0)
os.waitpid(child, 0)
lease = lock.extend(lease)
print(lock.release(lease).value)
"""


def test_a_child_has_connections_of_its_own(lock, made):
    """And leaves those of its parent alone."""
    said = output_of(program(FORK, made))
    assert said.split() == ["taken", "RELEASED", "RELEASED"]


def with_options(url, options):
    return url + ("&" if "?" in url else "?") + options


def test_another_table_is_another_node(made, lock, locks):
    url = with_options(made, "table=mine")
    address_of(url).make_tables()
    mine = locks([SimpleNamespace(url=url)], **PATIENT)
    assert lock.acquire("n")
    assert mine.acquire("n")
    assert mine.labels != lock.labels


@on_postgresql
def test_tables_are_in_the_schema_that_was_named(made, lock, locks):
    url = with_options(made, "schema=locks")
    address_of(url).make_tables()
    mine = locks([SimpleNamespace(url=url)], **PATIENT)
    assert lock.acquire("n")
    lease = mine.acquire("n")
    assert mine.release(lease) is ReleaseOutcome.RELEASED
    with pytest.raises(LockTaken):
        lock.acquire("n")
