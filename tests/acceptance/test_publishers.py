"""The publisher's side of unique tasks: web processes, Django, names, and messages of others."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import make_dataclass
from datetime import date, datetime, timedelta, timezone
from datetime import time as time_of_day
from decimal import Decimal
from enum import Enum, IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional
from uuid import UUID

import pytest
import redis
from celery import Task
from kombu.exceptions import EncodeError
from kombu.utils import json as kombu_json
from pydantic import create_model

import celery_redlock
from celery_redlock import RedlockTask, UniqueResult, current_lock
from support.events import body, overlaps, read
from support.stage import stage
from support.versions import CELERY, since
from support.waiting import eventually

TTL = 3.0
NAMES = [f"n{number}" for number in range(25)]
#: Kinds of tasks that meet a message which somebody else made.
KINDS = ("started", "finished", "success", "expired", "rerun", "late", "not unique")

Line = create_model("Line", sku=(str, ...), price=(Decimal, ...), at=(datetime, ...))
Order = create_model("Order", id=(UUID, ...), lines=(list[Line], []), note=(Optional[str], None))


class Color(str, Enum):
    """An enum that is text."""

    RED = "red"


class Level(IntEnum):
    """An enum that is a number."""

    HIGH = 3


Address = make_dataclass("Address", [("street", str), ("number", int), ("since", date)])
#: One that says itself what it is in JSON, which kombu asks for.
Sent = make_dataclass(
    "Sent",
    [("street", str), ("since", date)],
    namespace={"__json__": lambda self: {"street": self.street, "since": self.since}},
)


def declare(app):
    """Declare tasks that many publish at once, that tell their lock, and that wait for a gate."""
    ours = {"base": RedlockTask, "shared": False}
    for way in ("join", "fail"):
        app.task(name=way, unique_until="finished", on_duplicate=way, **ours)(nothing)
    app.task(name="named", unique_until="finished", **ours)(named)
    app.task(name="template", unique_until="finished", lock_key="is:{value}", **ours)(named)
    app.task(name="rest", unique_until="finished", **ours)(rest)
    if CELERY >= (5, 5):
        app.task(name="model", unique_until="finished", pydantic=True, **ours)(model)
    untils = {"rerun": "finished", "late": "finished", "not unique": None}
    for kind in KINDS:
        app.task(
            name=kind,
            bind=True,
            unique_until=untils.get(kind, kind),
            unique_for=60.0 if kind != "not unique" else None,
            on_duplicate="rerun" if kind == "rerun" else "join",
            acks_late=kind == "late",
            unique_on=("name",),
            **ours,
        )(job)


def nothing(name):
    """Do nothing."""


def named(value):
    """Return under which lock this runs."""
    return current_lock().name


def rest(first, *others, last=None, **more):
    """Return the same, with arguments of every kind."""
    return current_lock().name


def model(order: Order, before: Optional[Order] = None) -> str:
    """Return the same, with arguments that Celery makes models of."""
    assert isinstance(order, Order)
    return current_lock().name


def job(self, name, gate=False):  # noqa: FBT002  an argument of a message
    """Return what this holds; wait before that until the test opens the gate."""
    with body(os.environ["EVENTS"], name):
        while gate and not Path(os.environ["EVENTS"]).with_name(f"{name}.open").exists():
            time.sleep(0.01)
        held = current_lock()
        held.ensure_held()
        return held.name, held.fence


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    """A stage with one worker."""
    folder = tmp_path_factory.mktemp("publishers")
    with stage(__file__, folder, redlock_ttl=TTL, redlock_max_ttl=TTL) as it:
        it.folder = folder
        it.worker(concurrency=4)
        yield it


@pytest.fixture
def broker(it):
    """A plain client of the broker."""
    with redis.Redis.from_url(it.broker.url) as client:
        yield client


def markers(it, lock_name):
    """Return what every node stores of the marker of a short lock name."""
    found = []
    for node in it.nodes:
        with redis.Redis.from_url(node.url) as client:
            found.append(client.hgetall(f"redlock:queued:{lock_name}"))
    return found


# -- processes that publish ----------------------------------------------------------------------


#: What every script begins with: the app as a web process has it, and how it tells the test.
HEAD = """
import json, os, sys, threading, time
import redis
from support.stage import make_app

file, conf, args = json.loads(sys.argv[1])
app = make_app(file, conf, is_worker=False)
broker = redis.Redis.from_url(conf["broker_url"])

def tell(**what):
    os.write(1, json.dumps(what).encode() + b"\\n")  # one write, so that lines do not mix

def publish(way, name, queue):
    from celery_redlock import DuplicateTask
    try:
        result = app.tasks[way].apply_async((name,), queue=queue)
        one = [result.id, result.holder_id, result.lock_name, result.duplicate]
    except DuplicateTask as error:
        one = [None, error.holder_id, error.lock_name, True]
    tell(name=name, told=one, pid=os.getpid(), thread=threading.get_ident())

def publish_all(way, names, queue, barrier):
    try:
        for name in names:
            barrier.wait(30)
            publish(way, name, queue)
    except BaseException as error:
        tell(failed=repr(error))
        raise
"""


def run(it, source, *args, before="", times=1):
    """
    Run a script in processes of its own, some at the same time, to their end.

    Returns:
        What they told, one dict per line.
    """
    root = str(Path(celery_redlock.__file__).parents[1])
    path = [str(Path(__file__).parents[1]), root, os.environ.get("PYTHONPATH", "")]
    whole = f"{before}\n{HEAD}\n{source}"
    told = []
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-c", whole]
                    + [json.dumps([__file__, it.conf, args])],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
            for _ in range(times)
        ]
        for process in processes:
            stack.callback(end, process)
        for process in processes:
            out, err = process.communicate(timeout=80)
            assert process.returncode == 0, err
            assert "Traceback" not in err, err
            told += [json.loads(line) for line in out.splitlines()]
    return told


def end(process):
    """End *process* with all its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)


def check_that_one_was_fresh(told, names, publishers):
    """One publish per name is fresh, over all processes; all others tell its id."""
    assert [one for one in told if "failed" in one] == []
    for name in names:
        answers = [one["told"] for one in told if one.get("name") == name]
        assert len(answers) == publishers
        fresh = [answer for answer in answers if not answer[3]]
        assert len(fresh) == 1, (name, answers)
        ((ident, *_),) = fresh
        assert {holder for _, holder, _, _ in answers} == {ident}
        assert {own for own, *_ in answers} <= {ident, None}
        assert len({lock_name for _, _, lock_name, _ in answers}) == 1


def ids_of_messages(broker, queue):
    """Return the ids of the tasks in a queue."""
    messages = [json.loads(message) for message in broker.lrange(queue, 0, -1)]
    return [message["headers"]["id"] for message in messages]


WEB = """
import multiprocessing, signal

way, names, queue, children, threads = args
publish(way, "before", queue)  # the master has connections now, and threads that connect
everybody = multiprocessing.get_context("fork").Barrier(children * threads)
pids = []
for _ in range(children):
    pid = os.fork()
    if pid == 0:
        work = lambda: publish_all(way, names, queue, everybody)
        others = [threading.Thread(target=work) for _ in range(threads - 1)]
        for thread in others:
            thread.start()
        work()
        for thread in others:
            thread.join()
        sys.exit()  # as a web server does it: everything is torn down
    pids.append(pid)
limit = time.monotonic() + 60
for pid in pids:
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < limit:
        time.sleep(0.02)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    tell(ended=bool(ended), status=status)
publish(way, "after", queue)
publish(way, "after", queue)
publish(way, names[0], queue)  # of its children
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("way", ["join", "fail"])
def test_a_web_server_that_forks_publishes_each_name_once(it, broker, way):
    """A master that has published forks children with threads: one message per name, no hang."""
    queue, children, threads = f"web {way}", 4, 4
    names = [f"web {name}" for name in NAMES]
    told = run(it, WEB, way, names, queue, children, threads)
    assert [one for one in told if "ended" in one] == [{"ended": True, "status": 0}] * children
    *of_children, last = [one for one in told if one.get("name") in names]
    check_that_one_was_fresh(of_children, names, children * threads)
    assert len({(one["pid"], one["thread"]) for one in of_children}) == children * threads
    assert last["told"][3]
    before, first, second = (one["told"] for one in told if one.get("name") in ("before", "after"))
    assert (before[3], first[3], second[3]) == (False, False, True)
    assert second[1] == first[0]
    fresh = [one["told"][0] for one in told if "told" in one and not one["told"][3]]
    assert Counter(ids_of_messages(broker, queue)) == Counter(fresh)
    assert broker.llen(queue) == len(names) + 2


GREEN = """
way, names, queue, processes, greenlets = args
everybody = threading.Barrier(greenlets)
publish(way, f"before {os.getpid()}", queue)
broker.incr(f"{queue} ready")
while int(broker.get(f"{queue} ready")) < processes:
    time.sleep(0.01)
running = [spawn(publish_all, way, names, queue, everybody) for _ in range(greenlets)]
for greenlet in running:
    getattr(greenlet, "wait" if "eventlet" in sys.modules else "get")()
publish(way, names[0], queue)
tell(ended=True)
"""
PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all(); from gevent import spawn",
    "eventlet": "import eventlet; eventlet.monkey_patch(); from eventlet import spawn",
}


@pytest.mark.parametrize("way", ["join", "fail"])
@pytest.mark.parametrize("patch", list(PATCHES))
def test_green_processes_publish_each_name_once(it, broker, patch, way):
    """Two patched processes, each with twenty greenlets: one message per name, no hang."""
    if not find_spec(patch):
        pytest.skip(f"{patch} is not installed")
    queue, processes, greenlets = f"{patch} {way}", 2, 20
    names = [f"{patch} {name}" for name in NAMES]
    told = run(
        it, GREEN, way, names, queue, processes, greenlets, before=PATCHES[patch], times=processes
    )
    assert [one for one in told if "ended" in one] == [{"ended": True}] * processes
    of_names = [one for one in told if one.get("name") in names]
    extra = processes  # the publish of the first name at the end of each
    check_that_one_was_fresh(of_names, names[1:], processes * greenlets)
    check_that_one_was_fresh(of_names, names[:1], processes * greenlets + extra)
    assert broker.llen(queue) == len(names) + processes


# -- Django ----------------------------------------------------------------------------------------


DJANGO = """
import django
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    USE_TZ=True,
)
django.setup()

from celery.contrib.django.task import DjangoTask
from django.db import connection, transaction
from celery_redlock import DuplicateTask, RedlockTask

class Task(RedlockTask, DjangoTask):
    abstract = True

class Rollback(Exception):
    pass

def body(order, note=None):
    pass

bill = app.task(name="bill", base=Task, shared=False, unique_until="finished", queue="bill",
    unique_on=("order",))(body)
strict = app.task(name="strict", base=Task, shared=False, unique_until="finished", queue="strict",
    unique_on=("order",), on_duplicate="fail")(body)
with connection.cursor() as cursor:
    cursor.execute("CREATE TABLE orders (id TEXT)")

def insert(order):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders VALUES (%s)", [order])

def look(when, order, task=bill):
    marks = 0
    for url in conf["redlock_nodes"]:
        with redis.Redis.from_url(url) as client:
            marks += client.exists(f"redlock:queued:{task.lock_name((order,))}")
    messages = [json.loads(message) for message in broker.lrange(task.queue, 0, -1)]
    own = [message for message in messages if repr(order) in message["headers"]["argsrepr"]]
    with connection.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM orders WHERE id = %s", [order])
        (rows,) = cursor.fetchone()
    tell(when=when, markers=marks, messages=len(own), rows=rows)
"""


@pytest.fixture
def django(it):
    """Run a script in a Django process, and return what it saw at each point."""
    if not find_spec("django"):
        pytest.skip("Django is not installed")

    def run_django(source):
        return {one.pop("when"): one for one in run(it, source, before="", django=True)}

    return run_django


def shows(seen, *, markers, messages, rows):
    """Return whether what was seen is that; of markers a majority is enough."""
    is_marked = seen["markers"] >= 3 if markers else seen["markers"] == 0
    return is_marked and (seen["messages"], seen["rows"]) == (messages, rows)
