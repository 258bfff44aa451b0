"""The table "you want, write": on the README and on page one, and each line does what it says."""

from __future__ import annotations

import importlib
import re
import sqlite3
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.rules import Rules
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap
from support.beats import published
from support.clients import let_go
from support.console import Console
from support.pages import Command
from support.waiting import eventually

ROOT = Path(__file__).parents[2]
README, PAGE_ONE = ROOT / "README.md", ROOT / "docs" / "index.md"
HEAD = "| you want | write | more |\n| --- | --- | --- |\n"
#: Longer than a stall of a loaded machine, and than the test [s].
TTL = 60

SHOP = """
from celery import Celery
from celery_redlock import RedlockTask

app = Celery("shop", broker={broker!r}, backend={broker!r}, set_as_current=False)
app.conf.update(
    redlock_ttl={ttl},
    redlock_node_timeout=1.0,
    beat_schedule={{"tick": {{"task": "shop.tick", "schedule": 1.0}}}},
)


def work(invoice_id=None, customer=None):
    return "ran"


def declared(name, **options):
    return app.task(name=name, **{{"base": RedlockTask, **options}})(work)


declared("shop.bill", lock_key="invoice:{{invoice_id}}")
declared("shop.tick")
wanted = declared("shop.wanted", {options})
another = declared("shop.another", {options})
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


class Shop:
    """An app with one server, and two tasks with the options of a line of the table."""

    def __init__(self, folder, broker, code, start_worker):
        self.folder, self.broker, self.code = folder, broker, code
        self._start_worker = start_worker
        options = code if re.match(r"\w+=", code) else ""
        text = SHOP.format(broker=broker.url, ttl=TTL, options=options)
        (folder / "shop.py").write_text(textwrap.dedent(text))
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        self.module = importlib.import_module("shop")
        self.app = self.module.app
        self.wanted, self.another = self.module.wanted, self.module.another

    def held(self, *names):
        """Hold these locks for the body of a ``with``."""
        stack = ExitStack()
        for name in names:
            stack.enter_context(plugin_for(self.app).locks.hold(name))
        return stack

    def work(self):
        return self._start_worker("shop")

    def close(self):
        sys.path.remove(str(self.folder))
        del sys.modules["shop"]
        plugin_for(self.app).locks.close()
        let_go(self.app)


def is_skipped(task, *args, **kwargs):
    """Run *task* here, and return whether it met its lock."""
    result = task.apply(args, kwargs).get()
    return result != "ran" and result["skipped"] == "conflict"


@pytest.fixture
def shop_for(tmp_path, broker, start_worker, request):
    """The shop with a line of the table: ``shop_for(need)``."""
    bootstrap([broker.url], Rules(ttl=TTL))
    shops = []

    def make(need):
        shops.append(Shop(tmp_path, broker, NEEDS[need], start_worker))
        shops[0].fixture = request.getfixturevalue
        return shops[0]

    yield make
    for shop in shops:
        shop.close()


# -- the lines ----------------------------------------------------------------------------------


@check("A task never twice at once")
def is_alone(shop):
    with shop.held(shop.wanted.lock_name((7,))):
        assert is_skipped(shop.wanted, 8)
        assert not is_skipped(shop.another, 8)
    assert not is_skipped(shop.wanted, 8)


@check("Not twice at once with the same argument")
def is_alone_with_its_argument(shop):
    with shop.held("invoice:7"):
        assert is_skipped(shop.wanted, 7)
        assert not is_skipped(shop.wanted, 8)


@check("Not twice in the queue")
def is_queued_once(shop):
    assert [shop.wanted.delay(7).duplicate for _ in range(3)] == [False, True, True]
    with redis.Redis.from_url(shop.broker.url) as client:
        assert client.llen("celery") == 1


@check("To wait instead of being skipped")
def waits(shop):
    worker = shop.work()
    with shop.held(shop.wanted.lock_name((7,))):
        result = shop.wanted.delay(7)
        worker.wait_for_log(rf"Queued .*{result.id}")
        assert not result.ready()
    assert result.get(timeout=100) == "ran"


@check("At most three at once")
def has_three_places(shop):
    places = [shop.wanted.lock_name(), *(f"{shop.wanted.lock_name()}#{n}" for n in (1, 2))]
    with shop.held(*places[:2]):
        assert not is_skipped(shop.wanted, 7)
    with shop.held(*places):
        assert is_skipped(shop.wanted, 7)


@check("One at a time per customer, in all tasks that say so")
def is_alone_per_customer(shop):
    with shop.held("customer:ann"):
        assert is_skipped(shop.wanted, customer="ann")
        assert is_skipped(shop.another, customer="ann")
        assert not is_skipped(shop.wanted, customer="ben")


@check("Once per schedule, with several beats")
def is_published_once_per_slot(shop):
    with ExitStack() as stack:
        for name in ("one", "two"):
            folder = shop.folder / name
            folder.mkdir()
            (folder / "shop.py").write_text((shop.folder / "shop.py").read_text())
            console = Console(folder)
            stack.callback(console.close)
            console.background(Command(shop.code), "leads ->")
        eventually(lambda: len(published(shop.broker.url)) > 3, "slots", timeout=100)
    slots = [it.due for it in published(shop.broker.url)]
    assert sorted(slots) == sorted(set(slots))


@check("Once an hour at most")
def runs_once_per_window(shop):
    shop.work()
    assert shop.wanted.delay(7).get(timeout=100) == "ran"
    again = shop.wanted.delay(7)  # though the first has ended
    assert (again.duplicate, shop.wanted.delay(8).duplicate) == (True, False)
    with redis.Redis.from_url(shop.broker.url) as client:
        (left,) = [client.pttl(key) for key in client.keys("redlock:queued:*")][:1]
    assert 3500 < left / 1000 <= 3600


@check("The task's code to stay as it is")
def is_protected_by_a_setting(shop):
    exec(shop.code, {"app": shop.app})
    tidy = shop.app.task(name="other.tidy")(clean)
    with shop.held(tidy.lock_name()):
        assert is_skipped(tidy)
    assert not is_skipped(tidy)


def clean():
    return "ran"


@check("To lock without Redis, on your PostgreSQL")
def locks_on_a_database(shop):
    url = shop.fixture("database").url.replace("postgresql+psycopg:", "postgresql:")
    exec(shop.code.replace("postgresql://app@db/shop", url), {"app": shop.app})
    address_of(url).make_tables()
    bootstrap([url], Rules(ttl=TTL))
    bill = shop.app.tasks["shop.bill"]
    with shop.held("invoice:7"):
        assert is_skipped(bill, 7)
        assert not is_skipped(bill, 8)
    assert "postgresql/" in plugin_for(shop.app).locks.labels[0]
    with redis.Redis.from_url(shop.broker.url) as client:
        assert not client.keys("redlock:lock:*")


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
