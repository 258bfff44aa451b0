"""
What the pages of docs/how-to/ claim, where their own blocks cannot show it.

The blocks themselves are run by `test_pages`. Here stands what takes a broker that is not Redis,
a server that is down or stopped, or the library's own arithmetic beside that of a page.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

import pytest

from celery_redlock import Rate, Redlock
from celery_redlock.lock.lease import quarantine_for, quorum, valid_until
from celery_redlock.lock.rules import Rules
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.settings import Settings
from celery_redlock.task.policies import Reschedule
from celery_redlock.task.rate import rate_of
from support.clients import let_go
from support.events import overlaps, read
from support.metrics import kept_port
from support.page_run import Names, run_page
from support.pages import blocks_of
from support.versions import since
from support.waiting import eventually

pytestmark = pytest.mark.long

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
OWN = (
    "choose-a-key",
    "choose-a-ttl",
    "how-many-nodes",
    "django",
    "fastapi",
    "rabbitmq",
    "beat",
    "monitoring",
    "limit-a-rate",
    "poison-messages",
)
#: So long that a loaded machine makes no node late [s].
PATIENCE = 1.0


def text_of(page):
    return (HOW_TO / f"{page}.md").read_text()


def rows_of(page, head):
    """Return the cells of the table of *page* whose head has *head*, without head and rule."""
    lines = text_of(page).splitlines()
    (begin,) = [at for at, line in enumerate(lines) if line.startswith("|") and head in line]
    rows = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def written(page, folder, places):
    for block in blocks_of(HOW_TO / f"{page}.md"):
        if "file" in block.notes:
            text, path = block.text, folder / block.notes["file"]
            for name, place in places.items():
                text = text.replace(name, place)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@contextmanager
def imported(folder, *names):
    """Import modules of *folder* for the body of a ``with``, and forget them afterwards."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(folder))
        for name in names:
            app = getattr(sys.modules.pop(name, None), "app", None)
            if app is not None and hasattr(app, "tasks"):
                plugin_for(app).locks.close()
                let_go(app)


@pytest.fixture
def lock_nodes(redis_nodes):
    nodes = redis_nodes(3)
    bootstrap([node.url for node in nodes], Rules())
    return nodes


def places_of(nodes, broker_url, results_url):
    places = {f"redis://lock-{n}/0": node.url for n, node in enumerate(nodes, 1)}
    return {**places, "redis://broker/0": broker_url, "redis://broker/1": results_url}


# -- numbers ----------------------------------------------------------------------------------


def test_the_arithmetic_of_the_page_on_ttls_is_that_of_the_lock():
    (block,) = [b for b in blocks_of(HOW_TO / "choose-a-ttl.md") if "def quarantine(" in b.text]
    page = {}
    exec(block.text, page)
    drift = Rules().drift_factor
    for ttl in (0.5, 1, 5, 20, 30, 60, 90, 300):
        lease = valid_until(0.0, ttl, drift)
        assert page["longest_stall"](ttl) == int(lease - ttl / 3), ttl
        assert page["quarantine"](ttl) == round(quarantine_for(ttl, drift)), ttl
    shown = {row[0]: row[1:] for row in rows_of("choose-a-ttl", "a short TTL")}
    stalls = next(cells for name, cells in shown.items() if "stalls" in name)
    assert [int(re.search(r"\d+", cell)[0]) for cell in stalls] == [3, 18, 36]
    renewals = next(cells for name, cells in shown.items() if "renewals" in name)
    assert [int(cell) for cell in renewals] == [3 * 60 // ttl for ttl in (5, 30, 60)]


def test_the_defaults_that_the_pages_name_are_those_of_the_settings():
    rules = Rules()
    settings = {field.name: field.default for field in fields(Settings)}
    assert "The default is 30 s" in text_of("choose-a-ttl")
    assert rules.ttl == 30
    assert "longest lease anybody may ask for, 60 s by default" in text_of("choose-a-ttl")
    assert rules.max_ttl == 60
    assert "(3600 s on Redis, and the default here)" in text_of("choose-a-ttl")
    assert settings["dedup_ttl"] == 3600
    assert "64 s by default" in text_of("how-many-nodes")
    assert round(rules.quarantine) == 64
    assert "`redlock_node_timeout`** (50 ms)" in text_of("how-many-nodes")
    assert rules.node_timeout == 0.05
    assert "the cap of `Reschedule` (60 s by default)" in text_of("rabbitmq")
    assert Reschedule().cap == 60


def test_majorities_are_those_of_the_lock():
    rows = rows_of("how-many-nodes", "may be away")
    assert [int(row[0]) for row in rows] == [1, 3, 5]
    for nodes, majority, away, _ in rows:
        assert int(majority) == quorum(int(nodes)) == int(nodes) - int(away)


def test_the_alerts_that_pages_name_are_in_the_file():
    """A page must not send anybody to an alert that is called otherwise."""
    rules = (HOW_TO.parents[1] / "ops" / "prometheus" / "alerts.yml").read_text()
    alerts = dict(re.findall(r"- alert: (\w+).*?severity: (\w+)", rules, re.DOTALL))
    named = {name for page in OWN for name in re.findall(r"`(Redlock[A-Z]\w+)`", text_of(page))}
    named -= {"RedlockTask"}
    assert len(named) > 8
    assert named <= set(alerts)
    told = [row[0] for row in rows_of("monitoring", "first step")]
    critical = {name for name, severity in alerts.items() if severity == "critical"}
    assert set(re.findall(r"`(\w+)`", " ".join(told[:4]))) == critical


def test_the_windows_that_the_page_on_rates_shows_are_those_of_the_rates():
    for written_rate, burst, window in rows_of("limit-a-rate", "at once (burst)"):
        code = written_rate.strip("`")
        rate = eval(code, {"Rate": Rate}) if "Rate" in code else rate_of("rate", code.strip('"'))
        assert (rate.burst, f"{rate.window:g} s") == (int(burst), window), code
        assert rate.slack == max(0.05, 0.05 * rate.window)
    assert "5 % longer (50 ms at least)" in text_of("limit-a-rate")
    assert round(Rules().quarantine) == 64
    assert "does not vote for [64 s]" in text_of("limit-a-rate")


# -- keys -------------------------------------------------------------------------------------


def test_a_release_that_holds_both_names_excludes_old_and_new(broker, tmp_path):
    bootstrap([broker.url], Rules())
    names = Names(places_of([], broker.url, broker.url))
    others = Redlock.from_urls([broker.url], node_timeout=PATIENCE)
    try:
        with run_page(HOW_TO / "choose-a-key.md", tmp_path, names) as page:
            sync = page.left["sync"]
            sync.app.conf.redlock_node_timeout = PATIENCE
            with others.hold("sync:1"):
                assert sync.apply((1,)).get()["skipped"] == "conflict"
            lease = others.acquire("shop:1")
            free = threading.Timer(0.5, others.release, (lease,))
            began = time.monotonic()
            free.start()
            assert sync.apply((1,)).get() == "synced 1"
            assert time.monotonic() - began > 0.4
            free.join()
    finally:
        others.close()


# -- FastAPI ----------------------------------------------------------------------------------


#: More than an event loop has while something holds it up.
MANY_TURNS = 10


@pytest.fixture
def shop_api(lock_nodes, redis_nodes, tmp_path):
    (broker,) = redis_nodes(1)
    places = places_of(lock_nodes, broker.url, broker.url.removesuffix("0") + "1")
    written("fastapi", tmp_path, places)
    with imported(tmp_path, "shop", "api") as (shop, api):
        shop.app.conf.redlock_node_timeout = PATIENCE
        shop.app.conf.redlock_nodes = [node.url for node in lock_nodes]  # may fail by themselves
        yield api, shop, broker


async def client_of(api):
    httpx = pytest.importorskip("httpx")
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=api.api), base_url="http://api")


def turns_while(api, call):
    async def run():
        async with await client_of(api) as client:
            asked, turns = asyncio.ensure_future(call(client)), 0
            while not asked.done():
                turns += 1
                await asyncio.sleep(0.01)
            return await asked, turns

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["/feeds/7", "/payouts/ann?amount=1"])
def test_a_publish_that_waits_does_not_hold_up_the_event_loop(shop_api, path):
    api, shop, broker = shop_api
    shop.rebuild.delay(0)  # connected by now: what it waits for is the publish
    broker.pause()

    def have_turns():
        """A stall may take all the time of a wait, but never of all of them."""
        answer, turns = turns_while(api, lambda client: client.post(path))
        assert answer.status_code == 503
        return turns > MANY_TURNS

    try:
        eventually(have_turns, "turns of others while it waits", timeout=100)
    finally:
        broker.resume()


def test_a_publish_in_the_event_loop_holds_it_up(shop_api):
    """The twin: with ``delay()`` right in an ``async def`` nothing else has its turn."""
    api, shop, broker = shop_api

    @api.api.post("/naive")
    async def naive():
        with suppress(Exception):
            shop.rebuild.delay(1)
        return {}

    shop.rebuild.delay(0)
    broker.pause()
    try:
        _, turns = turns_while(api, lambda client: client.post("/naive"))
    finally:
        broker.resume()
    assert turns < MANY_TURNS


def test_a_broker_that_is_down_is_a_503_and_costs_no_marker(shop_api):
    api, shop, broker = shop_api
    shop.rebuild.delay(0)
    broker.kill()
    answer, _ = turns_while(api, lambda client: client.post("/payouts/ann?amount=1"))
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "5"
    broker.restart()
    again, _ = turns_while(api, lambda client: client.post("/payouts/ann?amount=1"))
    assert again.status_code == 202


def test_without_a_quorum_it_is_202_or_503(shop_api, lock_nodes):
    api, _, _ = shop_api
    for node in lock_nodes[:2]:
        node.kill()
    feed, _ = turns_while(api, lambda client: client.post("/feeds/7"))
    payout, _ = turns_while(api, lambda client: client.post("/payouts/ann?amount=1"))
    assert (feed.status_code, payout.status_code) == (202, 503)


@contextmanager
def served(folder, api="ten_lines:api"):
    """Run the API of a page under uvicorn, at a port of its own; yield its URL, and its log."""
    pytest.importorskip("uvicorn")
    with kept_port() as port:
        command = [sys.executable, "-m", "uvicorn", api, "--port", str(port)]
        with (folder / "uvicorn.log").open("w") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}", folder / "uvicorn.log"
        finally:
            process.terminate()
            process.wait()


def locks_of_fastapi_page(redis_nodes, folder, changes=MappingProxyType({})):
    """Write the page's first example, with *changes*; return what takes the same locks."""
    (broker,) = redis_nodes(1)
    results = broker.url.removesuffix("0") + "1"
    bootstrap([results], Rules())
    written("fastapi", folder, places_of([], broker.url, results))
    text = (folder / "ten_lines.py").read_text()
    for old, new in {'1"])': f'1"], node_timeout={PATIENCE})', **changes}.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "ten_lines.py").write_text(text)
    return Redlock.from_urls([results], node_timeout=PATIENCE)


def test_an_async_view_takes_the_lock_of_the_task_under_uvicorn(redis_nodes, tmp_path):
    """While it waits for the lock, the same process answers others."""
    httpx = pytest.importorskip("httpx")
    # So long that it still waits when a slow machine has answered all others.
    tasks = locks_of_fastapi_page(redis_nodes, tmp_path, {"wait=5": "wait=30"})

    async def ask(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            with tasks.hold("feed:1") as held:
                waiting = asyncio.ensure_future(client.delete("/feeds/1"))
                others = [(await client.delete(f"/feeds/{n}")).status_code for n in range(2, 12)]
                was_waiting = not waiting.done()
            return was_waiting, others, (await waiting).json()["fence"] > held.fence

    try:
        with served(tmp_path) as (url, log):
            eventually(lambda: "Uvicorn running on" in log.read_text(), "server")
            assert asyncio.run(ask(url)) == (True, [200] * 10, True)
            assert "Traceback" not in log.read_text()
    finally:
        tasks.close()


def test_an_async_view_whose_lock_stays_taken_answers_409(redis_nodes, tmp_path):
    httpx = pytest.importorskip("httpx")
    tasks = locks_of_fastapi_page(redis_nodes, tmp_path, {"wait=5": "wait=0"})
    try:
        with served(tmp_path) as (url, log), tasks.hold("feed:1"):
            eventually(lambda: "Uvicorn running on" in log.read_text(), "server")
            assert httpx.delete(f"{url}/feeds/1", timeout=60).status_code == 409
    finally:
        tasks.close()


def test_a_child_publishes_after_its_parent_has(shop_api):
    """As under a server that forks after it has published: each has connections of its own."""
    _, shop, _ = shop_api
    first = shop.rebuild.delay(7)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        found = [shop.rebuild.delay(7).duplicate, shop.rebuild.delay(8).duplicate]
        os.write(writer, repr(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        assert told.read() == "[True, False]"
    assert os.waitpid(child, 0)[1] == 0
    assert shop.rebuild.delay(7).holder_id == first.id
    assert shop.rebuild.delay(8).duplicate


# -- Django -----------------------------------------------------------------------------------

ASGI = """
import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")
application = get_asgi_application()
"""
URLS = """
from django.urls import path
from shop.views import cancel, order

urlpatterns = [path("cancel/<int:invoice_id>", cancel), path("order/<int:invoice_id>", order)]
"""


@pytest.fixture
def mysite(redis_nodes, tmp_path):
    """Write the page's project as `startproject` would have it; return its broker's URL."""
    pytest.importorskip("django")
    (broker,) = redis_nodes(1)
    bootstrap([broker.url], Rules())
    patient = {"BROKER_URL])": f"BROKER_URL], node_timeout={PATIENCE})", "wait=1": "wait=30"}
    written("django", tmp_path, {"redis://broker/0": broker.url, **patient})
    (tmp_path / "shop/__init__.py").touch()
    (tmp_path / "mysite/asgi.py").write_text(ASGI)
    (tmp_path / "mysite/urls.py").write_text(URLS)
    with (tmp_path / "mysite/settings.py").open("a") as file:
        file.write('ROOT_URLCONF, ALLOWED_HOSTS = "mysite.urls", ["127.0.0.1"]')
    return broker.url


def test_an_async_view_of_django_takes_the_lock_of_the_task_under_uvicorn(mysite, tmp_path):
    """While one waits for the lock, the same process answers and publishes for others."""
    httpx = pytest.importorskip("httpx")
    tasks = Redlock.from_urls([mysite], node_timeout=PATIENCE)

    async def ask(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            with tasks.hold("invoice:1") as held:
                waiting = asyncio.ensure_future(client.post("/cancel/1"))
                paths = [f"/cancel/{n}" for n in range(2, 8)] + ["/order/1"]
                others = [(await client.post(path)).status_code for path in paths]
                was_waiting = not waiting.done()
            return was_waiting, others, (await waiting).json()["fence"] > held.fence

    try:
        with served(tmp_path, "mysite.asgi:application") as (url, log):
            eventually(lambda: "Uvicorn running on" in log.read_text(), "server")
            assert asyncio.run(ask(url)) == (True, [200] * 6 + [202], True)
            assert "Traceback" not in log.read_text()
    finally:
        tasks.close()


# -- RabbitMQ ---------------------------------------------------------------------------------

WORK = '''

import os
import time
from pathlib import Path

from support.events import body

app.conf.redlock_node_timeout = 1.0  # as PATIENCE


@app.task(base=RedlockTask, bind=True, lock_key="work:{name}", on_conflict=Reschedule(cap=30))
def work(self, name):
    """Run until there is a file of that name."""
    with body(os.environ["EVENTS"], name):
        while not Path(name).exists():
            time.sleep(0.02)
    return name


@app.task(bind=True)
def work_unlocked(self, name):
    return work.run(name)
'''


def bodies_of(folder, name):
    """Return the events of bodies under *name*; a copy of another test may come by yet."""
    return [event for event in read(folder / "events.jsonl") if event["name"] == name]


QUORUM = since(5, 6, "queues that are declared as they are used may be quorum queues")


@pytest.fixture
def rabbit_shop(rabbit, lock_nodes, broker, tmp_path):
    places = places_of(lock_nodes, rabbit.url, broker.url)
    written("rabbitmq", tmp_path, {**places, "amqp://guest:guest@rabbit:5672//": rabbit.url})
    with (tmp_path / "shop.py").open("a") as file:
        file.write(WORK)
    for name in rabbit.queues():  # a copy of another test's task would wait here for its file
        rabbit.purge(name)
    with imported(tmp_path, "shop") as (shop,):
        yield shop


@QUORUM
def test_the_shop_of_the_page_works_with_quorum_queues(rabbit, rabbit_shop, start_worker, tmp_path):
    start_worker("shop", concurrency=2, start_timeout=60)
    assert rabbit_shop.bill.delay(7).get(timeout=100) == "invoice 7 billed"
    first = rabbit_shop.work.delay("first")
    eventually(lambda: bodies_of(tmp_path, "first"), "start", timeout=100)
    second = rabbit_shop.work.delay("first")
    eventually(rabbit.delayed, "message that waits in the broker", timeout=100)
    (tmp_path / "first").touch()
    assert [it.get(timeout=60) for it in (first, second)] == ["first", "first"]
    assert overlaps(bodies_of(tmp_path, "first")) == []
    assert ("shop", "quorum") in rabbit.list_queues("type")


@QUORUM
@pytest.mark.parametrize("kind", ["work", "work_unlocked"])
def test_the_consumer_timeout_takes_a_message_and_not_the_lock(
    rabbit, rabbit_shop, start_worker, tmp_path, kind
):
    """
    As the page warns: the worker of a task that takes too long ends; from 4.3 on it connects again.

    The copy that the next worker gets is set aside, and one body ran. Twin: without a lock the
    copy runs, too.
    """
    rabbit.evaluate("application:set_env(rabbit, consumer_timeout, 2000)")
    rabbit.evaluate("application:set_env(rabbit, channel_tick_interval, 500)")
    try:
        worker = start_worker("shop", start_timeout=60, args=["-Q", "shop"])
        result = getattr(rabbit_shop, kind).delay(kind)
        eventually(lambda: bodies_of(tmp_path, kind), "start", timeout=100)
        other = start_worker("shop", start_timeout=60, args=["-Q", "shop"])
        ends = "Unrecoverable error: PreconditionFailed"
        goes_on = "Connection to broker lost"
        worker.wait_for_log(goes_on if rabbit.version() >= (4, 3) else ends)
        if kind == "work":
            eventually(
                lambda: re.search(rf"{result.id}\] for \d+ s:", worker.log() + other.log()),
                "copy that is set aside",
            )
        else:
            eventually(lambda: len(bodies_of(tmp_path, kind)) == 2, "second body")
    finally:
        (tmp_path / kind).touch()
        for name, value in (("consumer_timeout", 1800000), ("channel_tick_interval", 60000)):
            rabbit.evaluate(f"application:set_env(rabbit, {name}, {value})")
    assert result.get(timeout=60) == kind
    starts = [event for event in bodies_of(tmp_path, kind) if event["kind"] == "start"]
    assert len(starts) == (1 if kind == "work" else 2)
