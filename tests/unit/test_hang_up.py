"""The end of a database's connection from another thread."""

from __future__ import annotations

import sqlite3
import threading

import pytest

from celery_redlock.lock.database import postgresql
from celery_redlock.lock.database.sqlite import Sqlite
from celery_redlock.lock.database.store import Broken


class Store:
    """A connection that takes a while to hang up."""

    def __init__(self, takes=0.1):
        self.takes = takes
        self.begun, self.goes_on, self.has_ended = threading.Event(), threading.Event(), False

    def hang_up(self):
        self.begun.set()
        self.goes_on.wait(self.takes)
        self.has_ended = True


def late(store):
    """Have *store* not answer in time."""
    with postgresql.in_time(store, 0.01):
        assert store.begun.wait(60)
        raise Broken


def test_nobody_hangs_up_once_the_time_is_no_longer_measured():
    """Or it might hang up on whoever has the descriptor next."""
    store = Store()
    with pytest.raises(Broken, match=r"has not answered for 0\.01 s"):
        late(store)
    assert store.has_ended


def test_without_waiting_for_the_timer_it_hangs_up_on_another(monkeypatch):
    monkeypatch.setattr(threading.Timer, "join", lambda *_: None)
    store = Store(takes=60)
    with pytest.raises(Broken):
        late(store)
    assert not store.has_ended
    store.goes_on.set()


def test_what_breaks_in_time_is_told_as_it_is():
    with pytest.raises(Broken, match=r"^of itself$"), postgresql.in_time(Store(), 60.0):
        raise Broken("of itself")


def test_a_connection_that_is_closed_meanwhile_is_no_error():
    connection = sqlite3.connect(":memory:")

    class Closing(Sqlite):
        """The thread that has the connection closes it between two looks."""

        seen = (connection, None, None)

        @property
        def _connection(self):
            found, *self.seen = self.seen
            return found

        @_connection.setter
        def _connection(self, _value):
            pass

    store = object.__new__(Closing)
    store.hang_up()
    assert list(store.seen) == [None, None]
    connection.close()
