"""The publisher's side of unique tasks: web processes, Django, names, and messages of others."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import make_dataclass
from datetime import date, datetime, timedelta, timezone
from datetime import time as time_of_day
from decimal import Decimal
from enum import Enum, IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import redis
from celery.utils import uuid
from kombu.exceptions import EncodeError
from kombu.utils import json as kombu_json
from pydantic import create_model

import celery_redlock
from celery_redlock import RedlockTask, UniqueResult, current_lock
from support.events import body, overlaps, read
from support.stage import LASTING, stage
from support.stored import clients_of
from support.versions import CELERY, since
from support.waiting import eventually

pytestmark = pytest.mark.long

NAMES = [f"n{number}" for number in range(25)]
#: Kinds of tasks that meet a message which somebody else made.
KINDS = ("started", "finished", "success", "expired", "rerun", "late", "not unique")

Line = create_model("Line", sku=(str, ...), price=(Decimal, ...), at=(datetime, ...))
Order = create_model("Order", id=(UUID, ...), lines=(list[Line], []), note=(str, ""))


class Color(str, Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


Address = make_dataclass("Address", [("street", str), ("number", int), ("since", date)])
#: One that says itself what it is in JSON, which kombu asks for.
Sent = make_dataclass(
    "Sent",
    [("street", str), ("since", date)],
    namespace={"__json__": lambda self: {"street": self.street, "since": self.since}},
)


def declare(app):
    ours = {"base": RedlockTask, "shared": False}
    for way in ("join", "fail"):
        app.task(name=way, unique_until="finished", on_duplicate=way, **ours)(nothing)
    app.task(name="named", unique_until="finished", **ours)(named)
    app.task(name="template", unique_until="finished", lock_key="is:{value}", **ours)(named)
    app.task(name="rest", unique_until="finished", **ours)(rest)
    if CELERY >= (5, 5):
        app.task(name="model", unique_until="finished", pydantic=True, **ours)(model)
    until = {"rerun": "finished", "late": "finished", "not unique": None}
    for kind in KINDS:
        app.task(
            name=kind,
            bind=True,
            unique_until=until.get(kind, kind),
            unique_for=600.0 if kind != "not unique" else None,
            on_duplicate="rerun" if kind == "rerun" else "join",
            acks_late=kind == "late",
            unique_on=("name",),
            **ours,
        )(job)


def nothing(name):
    """Do nothing."""


def named(value):
    return current_lock().name


def rest(first, *others, last=None, **more):
    return current_lock().name


def model(order: Order, before: Order | None = None) -> str:
    assert isinstance(order, Order)
    return current_lock().name


def job(self, name, gate=False):  # noqa: FBT002  an argument of a message
    with body(os.environ["EVENTS"], name):
        while gate and not Path(os.environ["EVENTS"]).with_name(f"{name}.open").exists():
            time.sleep(0.01)
        held = current_lock()
        held.ensure_held()
        return held.name, held.fence


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    folder = tmp_path_factory.mktemp("publishers")
    with stage(__file__, folder, **LASTING) as it:
        it.folder = folder
        it.worker(concurrency=4)
        yield it
        assert overlaps(read(it.events)) == []
        it.no_key_is_for_ever()


@pytest.fixture
def broker(it):
    with redis.Redis.from_url(it.broker.url) as client:
        yield client


def markers(it, lock_name):
    return [client.hgetall(f"redlock:queued:{lock_name}") for client in clients_of(it.nodes)]


def is_left(it, lock_name, before):
    """Whether each node stores of a marker what it did; one that heard of it later counts, too."""
    after = markers(it, lock_name)
    return all(new == old for new, old in zip(after, before, strict=True) if old)


# -- processes that publish ----------------------------------------------------------------------


#: What every script begins with: the app as a web process has it, and how it tells the test.
HEAD = """
import json, os, sys, threading, time
import redis
from celery_redlock.lock.nodes import connections
from support.stage import make_app

connections.FIRST_CONNECT = 20.0  # a server that is slow to answer is not down
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
            barrier.wait(200)
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
    command = [sys.executable, "-W", "ignore", "-c", f"{before}\n{HEAD}\n{source}"]
    with contextlib.ExitStack() as stack:
        # A file, as a pipe may be full: a patched process would switch to another greenlet.
        out = stack.enter_context(tempfile.TemporaryFile("a+b"))
        processes = []
        for _ in range(times):
            process = subprocess.Popen(
                [*command, json.dumps([__file__, it.conf, args])],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.callback(end, process)
            processes.append(process)
        for process in processes:
            _, err = process.communicate(timeout=250)
            assert process.returncode == 0, err
            assert "Traceback" not in err, err
        out.seek(0)
        return [json.loads(line) for line in out]


def end(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def check_that_one_was_fresh(told, names, publishers):
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
limit = time.monotonic() + 200
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
    if not find_spec("django"):
        pytest.skip("Django is not installed")

    def run_django(source):
        return {one.pop("when"): one for one in run(it, DJANGO + source)}

    return run_django


def shows(seen, *, markers, messages, rows):
    """Return whether that is what was seen; of markers, a majority is enough."""
    is_marked = seen["markers"] >= 3 if markers else seen["markers"] == 0
    return is_marked and (seen["messages"], seen["rows"]) == (messages, rows)


def test_django_takes_the_marker_with_the_commit(django):
    seen = django("""
with transaction.atomic():
    insert("one")
    bill.delay_on_commit("one")
    look("within", "one")
look("after", "one")
with transaction.atomic():
    insert("two")
    with transaction.atomic():
        bill.apply_async_on_commit(("two",), queue="bill")
    look("after the inner", "two")
look("after the outer", "two")
bill.delay_on_commit("three")
look("without a transaction", "three")
""")
    assert shows(seen["within"], markers=False, messages=0, rows=1)
    assert shows(seen["after"], markers=True, messages=1, rows=1)
    assert shows(seen["after the inner"], markers=False, messages=0, rows=1)
    assert shows(seen["after the outer"], markers=True, messages=1, rows=1)
    assert shows(seen["without a transaction"], markers=True, messages=1, rows=0)


def test_django_leaves_nothing_of_what_is_rolled_back(django):
    seen = django("""
try:
    with transaction.atomic():
        insert("back")
        bill.delay_on_commit("back")
        look("within", "back")
        raise Rollback
except Rollback:
    pass
look("after", "back")
with transaction.atomic():
    insert("kept")
    bill.delay_on_commit("kept")
    try:
        with transaction.atomic():
            insert("undone")
            bill.delay_on_commit("undone")
            raise Rollback
    except Rollback:
        pass
look("kept", "kept")
look("undone", "undone")
with transaction.atomic():
    insert("back")
    bill.delay_on_commit("back")
look("again", "back")
""")
    assert shows(seen["within"], markers=False, messages=0, rows=1)
    assert shows(seen["after"], markers=False, messages=0, rows=0)
    assert shows(seen["kept"], markers=True, messages=1, rows=1)
    assert shows(seen["undone"], markers=False, messages=0, rows=0)
    assert shows(seen["again"], markers=True, messages=1, rows=1)


def test_django_publishes_once_what_a_transaction_asks_for_twice(django):
    seen = django("""
with transaction.atomic():
    insert("twice")
    bill.delay_on_commit("twice")
    bill.delay_on_commit("twice", note="the same name")
    bill.delay_on_commit("other")
    look("within", "twice")
look("after", "twice")
look("other", "other")
with transaction.atomic():
    bill.delay_on_commit("twice")
look("later", "twice")
""")
    assert shows(seen["within"], markers=False, messages=0, rows=1)
    assert shows(seen["after"], markers=True, messages=1, rows=1)
    assert shows(seen["other"], markers=True, messages=1, rows=0)
    assert shows(seen["later"], markers=True, messages=1, rows=1)


def test_django_tells_of_a_duplicate_after_the_commit(django):
    """With ``on_duplicate="fail"`` the error comes out of the commit, which has been done."""
    seen = django("""
first = strict.delay("refused").id
try:
    with transaction.atomic():
        insert("refused")
        strict.delay_on_commit("refused")
        look("within", "refused", strict)
except DuplicateTask as error:
    tell(when="error", holder_id=error.holder_id, first=first)
look("after", "refused", strict)
""")
    assert shows(seen["within"], markers=True, messages=1, rows=1)
    assert seen["error"]["holder_id"] == seen["error"]["first"]
    assert shows(seen["after"], markers=True, messages=1, rows=1)


# -- names -----------------------------------------------------------------------------------------


UTC_NOON = datetime(2024, 5, 1, 12, 0, 0, 1, tzinfo=timezone.utc)
EAST = timezone(timedelta(hours=5, minutes=30))
IDENT = UUID("12345678-1234-5678-1234-567812345678")
VALUES = {
    "aware datetime": UTC_NOON,
    "datetime with an offset": UTC_NOON.astimezone(EAST),
    "naive datetime": datetime(2024, 5, 1, 12, 0, 0, 1),  # noqa: DTZ001  that is what is tested
    "midnight": datetime(2024, 5, 1),  # noqa: DTZ001  likewise
    "date": date(2024, 5, 1),
    "time": time_of_day(12, 30, 0, 7),
    "uuid": IDENT,
    "decimal": Decimal("1.10"),
    "decimal with another scale": Decimal("1.1"),
    "large decimal": Decimal("1E+30"),
    "str enum": Color.RED,
    "int enum": Level.HIGH,
    "tuple": (1, (2, "x"), ()),
    "int-keyed dict": {2: "b", 1: "a", 10: {3: None}},
    "keys of many types": {True: 1, None: 2, 1.5: 3, Color.RED: 4, Level.HIGH: 5},
    "bytes": b"plain",
    "bytes that are no text": b"\xff\x00\xfe",
    "no bytes": b"",
    "text": "Grüße \U0001f600 \u2028",
    "text like an envelope": '{"__type__": "uuid"}',
    "large integer": 2**200,
    "float": 0.1 + 0.2,
    "integral float": 3.0,
    "infinity": float("inf"),
    "nothing": None,
    "yes": True,
    "sent as it says": Sent("Elm", date(2024, 5, 1)),
    "mixture": {
        "who": (IDENT, Color.RED, Level.HIGH),
        7: [{"when": UTC_NOON, "days": {date(2024, 5, n).isoformat(): n for n in (2, 1)}}],
        "raw": {"a": b"\xff", "b": [(b"x", Decimal("0.00")), {}]},
        "at": {1: {2: {3: (time_of_day(1), Sent("Oak", date(2024, 5, 2)))}}},
    },
    "tuple of all": (UTC_NOON, IDENT, b"\x80", Decimal(-0), {1: (Level.HIGH,)}, [Color.RED]),
}


def as_a_worker_reads(value):
    return kombu_json.loads(kombu_json.dumps(value))


@pytest.mark.parametrize("value", VALUES.values(), ids=list(VALUES))
def test_client_and_worker_give_an_argument_the_same_name(it, value):
    task = it.task("named")
    result = task.delay(value)
    assert (result.duplicate, result.lock_name) == (False, task.lock_name((value,)))
    assert result.get(timeout=100) == result.lock_name
    assert task.lock_name(None, {"value": as_a_worker_reads(value)}) == result.lock_name


def test_different_arguments_have_different_names(it):
    others = [1, "1", 1.0, "2024-05-01", str(IDENT), 3, "3", "None", "true", {}, []]
    names = [it.task("named").lock_name((value,)) for value in [*VALUES.values(), *others]]
    twins = {it.task("named").lock_name((3,))}  # Level.HIGH is sent as a 3
    assert {name for name, times in Counter(names).items() if times > 1} == twins


PRINTABLE = [
    name for name, value in VALUES.items() if not isinstance(value, (dict, tuple, bytes, Sent))
]


@pytest.mark.parametrize("kind", PRINTABLE)
def test_client_and_worker_print_an_argument_the_same_way(it, kind):
    task, value = it.task("template"), VALUES[kind]
    result = task.delay(value)
    assert result.lock_name == task.lock_name((value,)) == f"is:{as_a_worker_reads(value)}"
    assert result.get(timeout=100) == result.lock_name


def test_client_and_worker_agree_on_arguments_of_every_kind(it):
    task = it.task("rest")
    args = (IDENT, UTC_NOON, (1, b"\xff"))
    kwargs = {"last": {1: Color.RED}, "day": date(2024, 5, 1), "level": Level.HIGH}
    result = task.apply_async(args, kwargs)
    assert result.lock_name == task.lock_name(args, kwargs)
    assert result.lock_name == task.lock_name(as_a_worker_reads(args), as_a_worker_reads(kwargs))
    assert result.get(timeout=100) == result.lock_name
    signed = task.s(*args, **kwargs).apply_async(queue="nobody")
    assert signed.lock_name == result.lock_name
    assert task.signature(args, kwargs).apply_async(queue="nobody").id == signed.id


def task_module(task):
    return inspect.unwrap(task.run).__globals__


@since(5, 5, "pydantic=True")
def test_client_and_worker_give_a_model_the_same_name(it):
    task = it.task("model")
    # Not those of this file: the stage has imported it once more, under another name.
    Line, Order = (task_module(task)[name] for name in ("Line", "Order"))  # noqa: N806
    line = Line(sku="a", price=Decimal("1.10"), at=UTC_NOON)
    order = Order(id=IDENT, lines=[line, line.model_copy(update={"sku": "b"})])
    dumped = order.model_dump(mode="json")
    short = order.model_dump(mode="json", exclude_defaults=True)
    name = task.lock_name((order,))
    forms = [((it_,), {}) for it_ in (order, dumped, short)] + [((), {"order": order})]
    # Before Celery 5.7 a client dumps its models by itself.
    for args, kwargs in forms if CELERY >= (5, 7) else forms[1:3]:
        result = task.apply_async(args, kwargs)
        assert (result.duplicate, result.lock_name) == (False, name)
        assert task.lock_name(args, kwargs) == name
        assert result.get(timeout=100) == name
    assert task.lock_name((order, None)) == name
    assert task.lock_name((order, order)) == task.lock_name((dumped, short)) != name


@pytest.mark.parametrize("nested", [False, True])
def test_a_dataclass_has_the_name_of_its_fields_but_cannot_be_sent(it, nested):
    """
    A dataclass and the dict of its fields have one name, and the dict is what can be sent.

    kombu's JSON refuses the dataclass itself, unless it has a ``__json__``; then nothing was
    published, and the name is free.
    """
    task = it.task("named")
    address = Address("Elm", 7 if nested else 8, date(2024, 5, 1))
    fields = {"street": "Elm", "number": address.number, "since": date(2024, 5, 1)}
    value, sent = ({"to": [address]}, {"to": [fields]}) if nested else (address, fields)
    assert task.lock_name((value,)) == task.lock_name((sent,))
    with pytest.raises((EncodeError, TypeError)):
        task.delay(value)
    eventually(lambda: not any(markers(it, task.lock_name((value,)))), "end of the marker")
    result = task.delay(sent)
    assert not result.duplicate
    assert result.get(timeout=100) == result.lock_name == task.lock_name((value,))


# -- messages of others ----------------------------------------------------------------------------


def open_gate(it, name):
    (it.folder / f"{name}.open").touch()


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_producer_sends_runs_under_its_lock(it, kind):
    name = f"sent {kind}"
    lock_name = it.task(kind).lock_name((name,))
    first = it.app.send_task(kind, (name, True))
    assert not isinstance(first, UniqueResult)
    it.started(name)
    assert it.keys(f"redlock:lock:{lock_name}")
    assert not any(markers(it, lock_name))
    second = it.app.send_task(kind, (name, True))
    if kind != "rerun":  # which waits its turn, as nobody else would run what it was sent for
        assert second.get(timeout=100)["skipped"] == "conflict"
    open_gate(it, name)
    held, fence = first.get(timeout=100)
    assert (held, fence >= 1) == (lock_name, True)
    if kind == "rerun":
        assert second.get(timeout=100)[1] > fence
    assert len(it.bodies(name)) == (2 if kind == "rerun" else 1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("not unique", "expired")])
def test_what_another_producer_sends_ends_no_marker(it, kind):
    name = f"beside {kind}"
    task = it.task(kind)
    waiting = task.apply_async((name,), queue="nobody")
    before = markers(it, waiting.lock_name)
    sent = it.app.send_task(kind, (name,))
    assert sent.get(timeout=100)[0] == waiting.lock_name
    it.wait_until_free(waiting.lock_name)
    assert is_left(it, waiting.lock_name, before)
    assert sum(map(bool, before)) >= 3
    again = task.apply_async((name,), queue="nobody")
    assert (again.duplicate, again.holder_id) == (True, waiting.id)


WRONG = "0" * 40
LONG = "x" * 100_000


def nested(depth):
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


#: Headers that no publisher of ours makes; ``{name}`` is another task's lock name. Pairs get
#: the id of their own task and a word behind them, or they would not be looked at.
FORGED = {
    "nothing": None,
    "a number": 7,
    "a float": 1e308,
    "yes": True,
    "a word": "x",
    "a word of two": "xy",
    "a dict": {"name": "{name}", "token": WRONG},
    "a dict of two": {"0": "{name}", "1": WRONG},
    "empty": [],
    "a name alone": ["{name}"],
    "too many": ["{name}", WRONG, WRONG],
    "numbers": [1, 2],
    "no name": [None, WRONG],
    "no token": ["{name}", None],
    "an empty name": ["", WRONG],
    "an empty token": ["{name}", ""],
    "a short token": ["{name}", WRONG[1:]],
    "a long token": ["{name}", WRONG + "0"],
    "a token in capitals": ["{name}", "A" * 40],
    "a token and a newline": ["{name}", WRONG + "\n"],
    "a token of other digits": ["{name}", "\u0660" * 40],
    "nested": [["{name}"], [WRONG]],
    "nested twice": [[["{name}", WRONG]], [["{name}", WRONG]]],
    "deep": nested(200),
    "deep ones": [nested(200), nested(200)],
    "a long name": [LONG, WRONG],
    "a long token of digits": ["{name}", "0" * 100_000],
    "both long": [LONG, LONG],
    "a long word": LONG,
    "many": [[WRONG] * 2000] * 2,
    "another's": ["{name}", WRONG],
    "a name with control characters": ["a\r\nDEL *\0", WRONG],
    "a pattern": ["*", WRONG],
    "half a character": ["\ud800", WRONG],
    "another task's": ["{name}", WRONG, "another", "finished"],
    "no such word": ["{name}", WRONG, "another", "done"],
}


def of_another(forged, name, task_id):
    header = json.loads(json.dumps(forged).replace("{name}", name))
    told_id = header.pop(2) if isinstance(header, list) and len(header) == 4 else task_id
    if isinstance(header, list) and len(header) == 2:
        header += ["finished"]
    ours = {"v": 1, "task_id": told_id, "reservation": header}
    return {"headers": {"redlock": ours}, "task_id": task_id}


@pytest.fixture(scope="module")
def victims(it):
    waiting = {
        kind: it.task(kind).apply_async((f"victim {kind}",), queue="nobody")
        for kind in KINDS
        if kind != "not unique"
    }
    return {kind: (result, markers(it, result.lock_name)) for kind, result in waiting.items()}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_header_harms_nobody(it, victims, what):
    log = len(it.log())
    results = {}
    for kind in KINDS:
        name = f"forged {what} {kind}"
        victim, _ = victims.get(kind, victims["finished"])
        forged = of_another(FORGED[what], victim.lock_name, uuid())
        results[kind] = it.app.send_task(kind, (name,), **forged)
    for result in results.values():  # all of them first: what fails late is of this test, too
        result.get(timeout=100, propagate=False)
    for kind, result in results.items():
        held, fence = result.get()
        assert held == it.task(kind).lock_name((f"forged {what} {kind}",))
        assert fence >= 1
        assert len(it.bodies(f"forged {what} {kind}")) == 1
    it.wait_until_free()
    for victim, before in victims.values():
        assert sum(map(bool, before)) >= 3
        assert is_left(it, victim.lock_name, before)
    assert it.workers[0].alive
    assert "Traceback" not in it.log()[log:]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("not unique", "rerun")])
def test_a_forged_token_does_not_end_the_marker_of_the_same_name(it, kind):
    name = f"same {kind}"
    task = it.task(kind)
    waiting = task.apply_async((name,), queue="nobody")
    before = markers(it, waiting.lock_name)
    for send in (it.app.send_task, it.app.tasks[kind].apply_async):
        first = (kind,) if send == it.app.send_task else ()
        forged = of_another([waiting.lock_name, WRONG], "", uuid())
        result = send(*first, (name,), **forged)
        assert result.get(timeout=100)[0] == waiting.lock_name
    it.wait_until_free(waiting.lock_name)
    assert is_left(it, waiting.lock_name, before)
    again = task.apply_async((name,), queue="nobody")
    assert (again.duplicate, again.holder_id) == (True, waiting.id)


@pytest.mark.parametrize("what", ["another's", "half a character", "both long", "nested"])
def test_revoking_a_task_with_a_forged_header_ends_no_marker(it, victims, what):
    victim, before = victims["finished"]
    name = f"revoked {what}"
    forged = of_another(FORGED[what], victim.lock_name, uuid())
    sent = it.app.send_task("finished", (name,), countdown=280, **forged)
    eventually(lambda: sent.id in str(it.app.control.inspect().scheduled()), "an ETA", timeout=100)
    sent.revoke()
    after = it.task("finished").delay(f"after {name}")  # in its parent, that comes after
    assert after.get(timeout=100)
    # A revoke ends a marker within half a second: this is to be sure that it does not.
    time.sleep(1.0)
    assert is_left(it, victim.lock_name, before)
    assert it.workers[0].alive
    assert it.bodies(name) == []
