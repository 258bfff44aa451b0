"""Celery events over a real broker that goes away and comes back."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.app import trace

from celery_redlock.events import NodeUp
from celery_redlock.observers import outbox
from celery_redlock.observers.celery_events import CeleryEvents
from support.clients import let_go
from support.waiting import eventually


@pytest.fixture
def server(redis_nodes):
    return redis_nodes(1)[0]


@pytest.fixture
def app(server, monkeypatch):
    monkeypatch.setattr(trace, "_localized", [None, None, "w1@localhost"])
    monkeypatch.setattr(outbox, "GATHER", 0.01)
    monkeypatch.setattr(outbox, "LONGEST_PAUSE", 0.02)
    app = Celery("shop", broker=server.url, set_as_current=False)
    yield app
    let_go(app)


@pytest.fixture
def observer(app):
    observer = CeleryEvents(SimpleNamespace(app=app, sends_events=True))
    yield observer
    observer(NodeUp("the last"))
    observer.flush()


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_hundred_tries_leave_neither_files_nor_threads(server, observer, monkeypatch):
    tries = []
    send = observer._outbox._send
    monkeypatch.setattr(observer._outbox, "_send", lambda batch: tries.append(1) or send(batch))
    observer(NodeUp("n"))
    eventually(lambda: tries and not observer._outbox._is_pending, "the first event")
    files, threads = open_files(), threading.active_count()
    server.kill()
    observer(NodeUp("n"))
    eventually(lambda: len(tries) > 100, "a hundred tries")
    assert open_files() <= files + 1
    assert threading.active_count() <= threads
    server.restart()
    eventually(lambda: not observer._outbox._is_pending, "the second event")


def test_telling_takes_no_longer_without_a_broker(server, observer):
    observer(NodeUp("n"))
    eventually(lambda: not observer._outbox._is_pending, "the first event")
    server.pause()
    for _ in range(1000):  # one that waited for the broker would wait for longer than a test may
        observer(NodeUp("n"))
    observer.flush()
    server.resume()
