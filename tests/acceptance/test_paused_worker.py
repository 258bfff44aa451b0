"""
The story of the paused worker, as docs/how-to/fenced-writes.md tells it.

A worker is stopped after it has made sure of its lock and before it writes. Its lease ends,
another worker takes the lock and writes, and then the first one goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import (
    BigInteger,
    Column,
    MetaData,
    String,
    Table,
    create_engine,
    insert,
    select,
    update,
)
from sqlalchemy.pool import NullPool

from celery_redlock import RedlockTask
from celery_redlock.fencing import StaleFence
from celery_redlock.fencing.sqlalchemy import fenced_update
from support.events import read, record
from support.stage import stage
from support.waiting import eventually

pytestmark = pytest.mark.long

#: Short, as each story waits for its end; a machine that stalls for less keeps it.
TTL = 6.0
META = MetaData()
FILE = Table(
    "file",
    META,
    Column("name", String(50), primary_key=True),
    Column("content", String(50)),
    Column("fence", BigInteger),
)


def declare(app):
    def write(self, store, content, may_write):
        self.lock.ensure_held()
        record(os.environ["EVENTS"], "sure", content=content, fence=self.lock.fence)
        eventually(Path(may_write).exists, "word that it may write")
        change = update(FILE).where(FILE.c.name == "report").values(content=content)
        with create_engine(store, poolclass=NullPool).begin() as db:
            if self.name == "fenced":
                return fenced_update(db, change, self.lock.fence)
            return db.execute(change).rowcount

    for name in ("fenced", "unfenced"):
        # By default LockLost is raised in the body once it goes on, if that comes before the
        # write; nobody can say that it does. With "warn" it never comes before.
        ours = {"lock_key": "{store}", "lock_wait": 100.0, "on_lock_lost": "warn"}
        app.task(name=name, base=RedlockTask, bind=True, shared=False, **ours)(write)


@pytest.fixture(scope="module", params=["prefork", "threads"])
def it(request, tmp_path_factory):
    conf = {"redlock_ttl": TTL, "redlock_max_ttl": TTL, "redlock_node_timeout": 1.0}
    with stage(__file__, tmp_path_factory.mktemp(request.param), **conf) as it:
        it.start_workers(
            {"name": queue, "pool": request.param, "concurrency": 1, "args": ["-Q", queue]}
            for queue in ("first", "second")
        )
        it.by_name = {queue_of(worker): worker for worker in it.workers}
        yield it


def queue_of(worker):
    return worker.command[-1]


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request, tmp_path):
    if request.param == "postgresql":
        url = request.getfixturevalue("database").url
    else:
        url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    engine = create_engine(url, poolclass=NullPool)
    META.create_all(engine)
    with engine.begin() as db:
        db.execute(insert(FILE).values(name="report", content="nothing yet"))
    return url


def content_and_fence(store):
    with create_engine(store, poolclass=NullPool).connect() as db:
        return tuple(db.execute(select(FILE.c.content, FILE.c.fence)).one())


def sure(it, store, content):
    return eventually(
        lambda: next((e for e in read(it.events, "sure") if e["content"] == content), None),
        f"writer of {content!r} that is sure of its lock",
        timeout=100,
    )


def state_of(pid):
    """Return how a process is: T for stopped."""
    told = subprocess.run(
        ["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=True
    )
    return told.stdout.strip()[:1]


def story(it, tmp_path, store, task):
    may_write, at_once = tmp_path / "may_write", tmp_path / "at_once"
    at_once.touch()
    # Each story has contents of its own, because one record serves all of a stage.
    early, late = f"early {tmp_path.name}", f"late {tmp_path.name}"
    worker = it.by_name["first"]
    first = it.task(task).apply_async((store, early, str(may_write)), queue="first")
    writer = sure(it, store, early)
    os.killpg(worker.pid, signal.SIGSTOP)
    try:
        eventually(lambda: state_of(writer["pid"]) == "T", "stopped worker")
        may_write.touch()  # it is stopped before its write, and nothing else holds it up now
        second = it.task(task).apply_async((store, late, str(at_once)), queue="second")
        assert second.get(timeout=100) == 1, "the newer holder did not write"
        assert content_and_fence(store)[0] == late
        assert not first.ready()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGCONT)
    return first, writer["fence"], sure(it, store, late)["fence"], late, early


def test_the_paused_writer_is_refused(it, tmp_path, store):
    first, old, new, late, _ = story(it, tmp_path, store, "fenced")
    with pytest.raises(StaleFence) as stale:
        first.get(timeout=100)
    assert old < new
    assert stale.value.args == ("file", old, new)
    assert content_and_fence(store) == (late, new)


def test_without_the_fence_the_newer_write_is_lost(it, tmp_path, store):
    """The twin: both tasks end well, and what the newer holder wrote is gone."""
    first, old, new, _, early = story(it, tmp_path, store, "unfenced")
    assert first.get(timeout=100) == 1
    assert old < new
    assert content_and_fence(store) == (early, None)
