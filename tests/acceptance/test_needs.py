"""The table "you want, write": on the README and on page one, and each line does what it says."""

from __future__ import annotations

import asyncio
import importlib
import re
import sqlite3
import sys
import textwrap
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from celery_redlock import AsyncRedlock, LockTaken, Rate, Redlock, TooManyDeliveries
from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.rules import Rules
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.all_locks import AllLocks, AllReservations
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.reading.search import scan_pattern
from celery_redlock.task.rate import rate_of
from support.beats import published_of
from support.clients import let_go
from support.console import Console
from support.kinds import DATABASES
from support.pages import Command
from support.waiting import eventually

ROOT = Path(__file__).parents[2]
README, PAGE_ONE = ROOT / "README.md", ROOT / "docs" / "index.md"
#: The database in a line of the table.
EXAMPLE = "postgresql://app@db/shop"
LONG = [pytest.mark.long]
HEAD = "| you want | write | more |\n| --- | --- | --- |\n"
#: Longer than a stall of a loaded machine, and than the test [s].
TTL = 60

SHOP = """
import os
import signal

from celery import Celery
from celery_redlock import RedlockTask

app = Celery("shop", broker={broker!r}, backend={backend!r}, set_as_current=False)
app.conf.update(
    redlock_ttl={ttl},
    redlock_node_timeout={patience},
    task_default_queue={queue!r},
    beat_schedule={{"tick": {{"task": "shop.tick", "schedule": 1.0}}}},
)
{settings}


def work(invoice_id=None, customer=None):
    return "ran"


def declared(name, **options):
    return app.task(name=name, **{{"base": RedlockTask, **options}})(work)


declared("shop.bill", lock_key="invoice:{{invoice_id}}")
declared("shop.tick")
app.task(name="other.tidy")(work)
wanted = declared("shop.wanted", {options})
another = declared("shop.another", {options})


@app.task(name="shop.killing", **{{"base": RedlockTask, **dict({options})}})
def killing(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def needs(page):
    """Return the table of *page*: need -> code to write."""
    table = page.read_text().partition(HEAD)[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {need: re.match(r"`(.+?)`", cell)[1] for need, cell, _ in rows}


NEEDS = needs(README)
CHECKS = {}


def check(need):
    def note(function):
        CHECKS[need] = function
        return function

    return note


@dataclass(frozen=True)
class Place:
    """Where a shop's messages, results and locks are."""

    broker: str
    backend: str
    #: The lock node; empty where the app finds it by itself.
    node: str = ""


def is_free(locks, name):
    return not any(view.holder or view.problem for view in locks.inspect(name))


class Shop:
    """
    An app with one lock node, and two tasks with the options of a line of the table.

    On Redis tasks run here, as all that matters is their lock; on a database two workers run them.
    """

    def __init__(self, folder, place, code, start_worker):
        self.folder, self.place, self.code = folder, place, code
        self._start_worker, self._workers = start_worker, []
        settings = f"app.conf.redlock_nodes = [{place.node!r}]\n" if place.node else ""
        text = SHOP.format(
            broker=place.broker,
            backend=place.backend,
            ttl=TTL,
            patience=10.0 if place.node else 1.0,  # an answer of a database is a commit
            queue=f"shop-{uuid.uuid4().hex}",
            settings=settings + (code if code.startswith("app.conf") else ""),
            options=code if re.match(r"\w+=", code) else "",
        )
        (folder / "shop.py").write_text(textwrap.dedent(text))
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        self.module = importlib.import_module("shop")
        self.app = self.module.app
        self.wanted, self.another = self.module.wanted, self.module.another
        self.killing = self.module.killing

    @property
    def node(self):
        return self.place.node or self.place.broker

    @contextmanager
    def held(self, *names):
        """Hold these locks for the body of a ``with``; after it they are free."""
        locks = plugin_for(self.app).locks
        with ExitStack() as stack:
            for name in names:
                # A task that has ended may not have released it yet: that is told, not waited for.
                stack.enter_context(locks.hold(name, wait=60.0))
            yield
        for name in names:  # a release is told, and not waited for
            eventually(lambda name=name: is_free(locks, name), f"end of {name}")

    def work(self):
        """Have two workers."""
        while len(self._workers) < 2:
            self._workers.append(self._start_worker("shop", name=f"w{uuid.uuid4().hex}"))

    def is_skipped(self, task, *args, **kwargs):
        """Run *task*, and return whether it met its lock."""
        if self.place.node:
            self.work()
            result = task.apply_async(args, kwargs).get(timeout=100)
        else:
            result = task.apply(args, kwargs).get()
        return result != "ran" and result["skipped"] == "conflict"

    @property
    def logs(self):
        return "".join(worker.log() for worker in self._workers)

    def wait_for_log(self, pattern):
        eventually(lambda: re.search(pattern, self.logs), f"{pattern!r} in a log")

    def messages(self):
        """Return the headers of all messages that wait, and take them away."""
        with self.app.connection_for_read() as connection, connection.channel() as channel:
            queue = self.app.amqp.queues[self.app.conf.task_default_queue].bind(channel)
            queue.declare()
            return [one.headers for one in iter(lambda: queue.get(no_ack=True), None)]

    def close(self):
        sys.path.remove(str(self.folder))
        del sys.modules["shop"]
        plugin_for(self.app).locks.close()
        let_go(self.app)


@pytest.fixture(params=["redis", *(pytest.param(kind, marks=LONG) for kind in DATABASES)])
def kind(request):
    """Each kind of lock node; beside a database there is no Redis anywhere."""
    return request.param


@pytest.fixture
def place(kind, tmp_path, request):
    if kind == "redis":
        url = request.getfixturevalue("broker").url
        yield Place(url, url)
        return
    broker = request.getfixturevalue("rabbit").url
    if kind == "sqlite":
        # Results are in another file: SQLAlchemy does not wait for those who write.
        yield Place(broker, f"db+sqlite:///{tmp_path}/results.db", f"sqlite:///{tmp_path}/locks.db")
        return
    with request.getfixturevalue("postgres_servers")(kind).database() as database:
        yield Place(broker, f"db+{database.url}", database.url.replace("+psycopg", ""))


@pytest.fixture
def shop_for(tmp_path, place, start_worker, request):
    """The shop with a line of the table: ``shop_for(need)``."""
    shops = []

    def make(need):
        code = NEEDS[need]
        if EXAMPLE in code:
            node = place.node or request.getfixturevalue("database").url.replace("+psycopg", "")
            code = code.replace(EXAMPLE, node)
        shops.append(Shop(tmp_path, place, code, start_worker))
        nodes = plugin_for(shops[0].app).settings.nodes
        if place.node or EXAMPLE in NEEDS[need]:
            address_of(nodes[0]).make_tables()
        assert set(bootstrap(nodes, Rules(ttl=TTL, node_timeout=10.0)).values()) == {"enrolled"}
        return shops[0]

    yield make
    for shop in shops:
        shop.close()


# -- the lines ----------------------------------------------------------------------------------


@check("A task never twice at once")
def is_alone(shop):
    with shop.held(shop.wanted.lock_name((7,))):
        assert shop.is_skipped(shop.wanted, 8)
        assert not shop.is_skipped(shop.another, 8)
    assert not shop.is_skipped(shop.wanted, 8)


@check("Not twice at once with the same argument")
def is_alone_with_its_argument(shop):
    with shop.held("invoice:7"):
        assert shop.is_skipped(shop.wanted, 7)
        assert not shop.is_skipped(shop.wanted, 8)


@check("Not twice in the queue")
def is_queued_once(shop):
    assert [shop.wanted.delay(7).duplicate for _ in range(3)] == [False, True, True]
    assert len(shop.messages()) == 1


@check("To wait instead of being skipped")
def waits(shop):
    shop.work()
    with shop.held(shop.wanted.lock_name((7,))):
        result = shop.wanted.delay(7)
        shop.wait_for_log(rf"Queued .*{result.id}")
        assert not result.ready()
    assert result.get(timeout=100) == "ran"


@check("At most three at once")
def has_three_places(shop):
    places = [shop.wanted.lock_name(), *(f"{shop.wanted.lock_name()}#{n}" for n in (1, 2))]
    with shop.held(*places[:2]):
        assert not shop.is_skipped(shop.wanted, 7)
    with shop.held(*places):
        assert shop.is_skipped(shop.wanted, 7)


@check("One at a time per customer, in all tasks that say so")
def is_alone_per_customer(shop):
    with shop.held("customer:ann"):
        assert shop.is_skipped(shop.wanted, customer="ann")
        assert shop.is_skipped(shop.another, customer="ann")
        assert not shop.is_skipped(shop.wanted, customer="ben")


@check("So many per customer, as its plan says")
def has_places_as_the_call_says(shop):
    with shop.held("customer:ann", "customer:ann#1"):
        assert shop.is_skipped(shop.wanted, customer={"id": "ann", "seats": 2})
        assert not shop.is_skipped(shop.wanted, customer={"id": "ann", "seats": 3})
        assert not shop.is_skipped(shop.wanted, customer={"id": "ben", "seats": 1})


@check("So many a minute, over all workers")
def starts_so_often(shop):
    """Ten at once, each of which counts for the tenth part of a minute, and a little more."""
    shop.work()
    name = f"{shop.wanted.lock_name()}#rate"
    with shop.held(name, *(f"{name}#{number}" for number in range(1, 10))):
        late = shop.wanted.delay(7)
        shop.wait_for_log(rf"Queued .*{late.id}.* its lock_rate")
    assert late.get(timeout=100) == "ran"
    assert rate_of("lock_rate", "100/m") == Rate(100, 60, burst=10)
    settings = plugin_for(shop.app).settings
    starts = AllLocks(settings.nodes, settings.rules, scan_pattern(name))
    assert all(one.ttl <= 6.31 for one in starts)


@check("Once per schedule, with several beats")
def is_published_once_per_slot(shop):
    found = []
    with ExitStack() as stack:
        for name in ("one", "two"):
            folder = shop.folder / name
            folder.mkdir()
            (folder / "shop.py").write_text((shop.folder / "shop.py").read_text())
            console = Console(folder)
            stack.callback(console.close)
            console.background(Command(shop.code), "leads ->")
        eventually(lambda: found.extend(shop.messages()) or len(found) > 3, "slots", timeout=100)
    slots = [it.due for it in published_of(found + shop.messages())]
    assert sorted(slots) == sorted(set(slots))


@check("Once an hour at most")
def runs_once_per_window(shop):
    shop.work()
    assert shop.wanted.delay(7).get(timeout=100) == "ran"
    again = shop.wanted.delay(7)  # though the first has ended
    assert (again.duplicate, shop.wanted.delay(8).duplicate) == (True, False)
    settings = plugin_for(shop.app).settings
    (left, *_) = [it.reservation.left for it in AllReservations(settings.nodes, settings.rules)]
    assert 3500 < left <= 3600


@check("A task that kills its worker not to come back forever")
def gives_up_what_kills_its_worker(shop):
    shop.work()
    result = shop.killing.delay()
    with pytest.raises(TooManyDeliveries, match="was started 3 times"):
        result.get(timeout=100)
    lost = r"whose process \d+ was lost"  # which is logged once its lock is free again
    eventually(lambda: len(re.findall(lost, shop.logs)) == 3, "word of each loss")
    assert shop.app.tasks["shop.bill"].delay(7).get(timeout=100) == "ran"


@check("A burst of calls: once, with the newest arguments")
def runs_the_last_of_a_burst(shop):
    shop.work()
    *others, last = [shop.wanted.delay(7, customer) for customer in ("ann", "ben", "cem")]
    assert last.get(timeout=100) == "ran"
    skipped = [result.get(timeout=100) for result in others]
    assert [one["holder"]["task_id"] for one in skipped] == [last.id, last.id]


@check("The task's code to stay as it is")
def is_protected_by_a_setting(shop):
    tidy = shop.app.tasks["other.tidy"]
    with shop.held(tidy.lock_name()):
        assert shop.is_skipped(tidy)
    assert not shop.is_skipped(tidy)


@check("To lock without Redis, on your PostgreSQL")
def locks_on_a_database(shop):
    bill = shop.app.tasks["shop.bill"]
    with shop.held("invoice:7"):
        assert shop.is_skipped(bill, 7)
        assert not shop.is_skipped(bill, 8)
    (label,) = plugin_for(shop.app).locks.labels
    assert label.startswith(("postgresql/", "sqlite/"))


def patient(code):
    return code.replace('"]', '"], node_timeout=10.0')  # an answer of a database is a commit


@check("The same lock in an async view")
def is_locked_by_a_view(shop):
    view = f"async def view(inside):\n    {patient(shop.code)}\n        inside()"
    left = {"AsyncRedlock": AsyncRedlock}
    exec(view.replace("redis://broker/0", shop.node), left)
    bill, found = shop.app.tasks["shop.bill"], []
    asyncio.run(left["view"](lambda: found.extend(shop.is_skipped(bill, it) for it in (7, 8))))
    assert found == [True, False]
    eventually(lambda: not shop.is_skipped(bill, 7), "release")


@check("One leader among processes")
def leads_alone(shop):
    led = f"{patient(shop.code)}\n    inside(term)\n    break"
    others = plugin_for(shop.app).locks

    def inside(term):
        with pytest.raises(LockTaken):
            others.acquire("billing")
        fences.append(term.fence)

    fences = []
    for _ in range(2):
        names = {"Redlock": Redlock, "inside": inside}
        exec(led.replace("redis://broker/0", shop.node), names)
    assert fences == sorted(set(fences))
    assert others.acquire("billing", wait=60).fence > max(fences)


@check("Late writes refused")
def refuses_late_writes(shop):
    db = sqlite3.connect(":memory:")
    db.execute("CREATE TABLE invoice (id INTEGER, paid INTEGER, fence INTEGER)")
    db.execute("INSERT INTO invoice VALUES (7, 0, 0)")
    fences = []
    for _ in range(2):
        with plugin_for(shop.app).locks.hold("invoice:7") as held:
            fences.append(held.fence)
    late, newest = fences
    written = [
        db.execute(shop.code, {"id": 7, "fence": it}).rowcount for it in (late, newest, late)
    ]
    db.close()
    assert written == [1, 1, 0]


@check("To know why a task did not run")
def says_why(shop):
    console = Console(shop.folder)
    try:
        with shop.held("invoice:7"):
            said = console.run(Command(shop.code), expect=1)
        assert "Lock 'invoice:7' of task shop.bill: held." in said
        console.run(Command(shop.code), expect=0)  # free, and it says so
    finally:
        console.close()


@pytest.mark.parametrize("need", NEEDS)
def test_what_is_to_be_written_does_what_is_wanted(shop_for, need):
    CHECKS[need](shop_for(need))


def test_page_one_has_the_table_of_the_readme():
    """From need to line of code, with links of its own."""
    rows = README.read_text().partition(HEAD)[2].partition("\n\n")[0]
    assert rows.replace("](docs/", "](") in PAGE_ONE.read_text()
    assert list(CHECKS) == list(NEEDS)
    begin = PAGE_ONE.read_text().partition("\n## ")
    assert begin[2].startswith("What do you want?")


def test_a_page_for_programs_names_every_page_for_users():
    """`llms.txt` leads to how-to guides and reference as they are; its code is code."""
    text = (ROOT / "docs" / "llms.txt").read_text()
    links = {ROOT / "docs" / link for link in re.findall(r"\]\(([\w./-]+\.md)\)", text)}
    assert [link for link in sorted(links) if not link.exists()] == []
    users = {"index.md", "tutorial.md", "migration.md", "operating.md", "limits.md", "glossary.md"}
    assert {ROOT / "docs" / name for name in users} <= links
    (code,) = re.findall(r"^```python\n(.+?)^```$", text, re.MULTILINE | re.DOTALL)
    compile(code, "llms.txt", "exec")
