"""Who waits in a process that no node can hear yet: they have the lock in turn once it listens."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from celery_redlock.lock.algorithm import acquiring
from celery_redlock.lock.database.store import Store
from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.waiting.listener import Listener
from celery_redlock.lock.waiting.waiting import WAIT
from support.waiting import eventually

MANY = 6


@pytest.fixture
def may_listen(monkeypatch):
    """Until this is set no process listens; and nobody tries again without a hint."""
    may_listen, subscribed = threading.Event(), Listener._subscribed

    def subscribe(listener, position):
        may_listen.wait()
        return subscribed(listener, position)

    monkeypatch.setattr(Listener, "_subscribed", subscribe)
    monkeypatch.setattr(acquiring, "pause_before", lambda client, tries, left, *_: left)
    yield may_listen
    may_listen.set()


def registrations(locks, monkeypatch):
    """Return a list that grows by one whenever the node is told that somebody waits."""
    tell, told = locks.driver.tell, []

    def note(request, *skip):
        tell(request, *skip)
        if request.script is WAIT:
            told.append(request)

    monkeypatch.setattr(locks.driver, "tell", note)
    return told


def all_have_it_in_turn(locks, may_listen, monkeypatch):
    """Have many wait, and one release before this process listens: that takes all out of line."""
    told, got, waiting = registrations(locks, monkeypatch), [], []
    first = locks.acquire("n")

    def wait(number):
        with locks.hold("n", wait=600):
            got.append(number)
            eventually(lambda: len(told) >= 2 * MANY - 1, "all others in line again")

    for number in range(MANY):
        waiting.append(threading.Thread(target=wait, args=(number,), daemon=True))
        waiting[-1].start()
        eventually(lambda n=number: len(told) > n, "one more")
    locks.release(first, wait=True)
    may_listen.set()
    for thread in waiting:
        thread.join(timeout=60)
    assert got == list(range(MANY))


def test_those_who_waited_before_it_listened_have_the_lock_in_turn(
    five_nodes, locks, may_listen, monkeypatch
):
    """Each is told by the one before; those who are not the oldest came once a second at best."""
    all_have_it_in_turn(locks(five_nodes[:1]), may_listen, monkeypatch)


def test_so_they_have_one_that_a_database_keeps(database_url, locks, may_listen, monkeypatch):
    address_of(database_url).make_tables()
    node = SimpleNamespace(url=database_url)
    all_have_it_in_turn(locks([node], node_timeout=20.0), may_listen, monkeypatch)


def test_a_database_says_that_it_is_listened_to_once_whoever_releases_can_see_that(
    database_url, monkeypatch
):
    """Who listens counts on it: those who wait are registered again by then."""
    address_of(database_url).make_tables()
    opened, open_ears = [], Store.open_ears

    def note(*words, **more):
        open_ears(*words, **more)
        opened.append(words)

    monkeypatch.setattr(Store, "open_ears", note)
    connection = address_of(database_url).connection()
    with ExitStack() as stack:
        stack.callback(connection.disconnect)
        connection.connect()
        connection.send_command("SUBSCRIBE", "redlock:wake:c")
        assert connection.read_response(disable_decoding=True)[0] == b"subscribe"
        assert opened
