"""A real worker never runs one name twice at once, and loses nothing; each law with its twin."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from celery import Celery, chain, chord
from kombu import pools

from celery_redlock import LockLost
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.all_locks import AllLocks
from celery_redlock.reading.nodes import bootstrap
from support import events as recording
from support.clients import let_go
from support.waiting import eventually

HERE = Path(__file__).parent
PATH = os.pathsep.join(str(folder) for folder in (HERE, HERE.parent, HERE.parents[1]))
READY = {"SUCCESS", "FAILURE", "REVOKED"}
#: A lease that is kept whatever the machine does, and one that is to be lost, or renewed, soon.
KEPT, LOST, RENEWED = 120.0, 6.0, 9.0


class Shop:
    def __init__(self, start_worker, broker, nodes, events):
        self._start = start_worker
        self.broker, self.nodes, self.events = broker, nodes, events
        self.client = Celery("client", broker=broker.url, backend=broker.url, set_as_current=False)
        self.ttl = KEPT

    def open(self, ttl=KEPT, **options):
        self.ttl = ttl
        if not getattr(self, "is_open", False):
            told = bootstrap(self.urls, self.rules)
            assert set(told.values()) == {"enrolled"}
        self.is_open = True
        env = {
            "BROKER": self.broker.url,
            "NODES": ",".join(self.urls),
            "TTL": str(ttl),
            "PYTHONPATH": PATH,
            **options.pop("env", {}),
        }
        return self._start("shop", env=env, **options)

    def close(self):
        let_go(self.client)
        pools.reset()

    @property
    def urls(self):
        return [node.url for node in self.nodes]

    @property
    def rules(self):
        return Rules(ttl=self.ttl, max_ttl=max(self.ttl, 3.0), node_timeout=1.0)

    def task(self, name, *args, **options):
        return self.client.signature(f"shop.{name}", args=args, **options)

    def publish(self, name, *args, **options):
        return self.task(name, *args, **options).apply_async()

    def recorded(self, kind=None):
        return recording.read(self.events, kind)

    def started(self, name):
        return eventually(
            lambda: [e for e in self.recorded("start") if e["name"] == name],
            f"start of {name}",
            timeout=100,
        )[0]


@pytest.fixture
def shop(start_worker, broker, five_nodes, events):
    with closing(Shop(start_worker, broker, five_nodes, events)) as made:
        yield made


@pytest.fixture
def frail_shop(start_worker, broker, redis_nodes, events):
    with closing(Shop(start_worker, broker, redis_nodes(5), events)) as made:
        yield made


def all_ready(results, timeout=200):
    eventually(lambda: all(r.state in READY for r in results), "end of all", timeout=timeout)
    return [r.state for r in results]


@pytest.mark.long
@pytest.mark.parametrize("locks", ["on", "off"])
def test_a_thousand_publishes_of_fifty_names_never_meet(shop, locks):
    shop.open(concurrency=4, env={"LOCKS": locks})
    results = [shop.publish("bill", n // 20) for n in range(1000)]
    assert set(all_ready(results)) == {"SUCCESS"}
    values = [result.result for result in results]
    ran = [value for value in values if "billed" in value]
    overlaps = recording.overlaps(shop.recorded())
    assert len(ran) == len(shop.recorded("end"))
    if locks == "off":
        assert overlaps
        return
    assert not overlaps
    assert all(value in ran or value["skipped"] == "conflict" for value in values)
    assert {value["billed"] for value in ran} == set(range(50))
    for invoice in range(50):  # in the order of their starts, fences grow
        starts = [e["task"] for e in shop.recorded("start") if e["name"] == f"bill {invoice}"]
        fences = [r.result["fence"] for task in starts for r in results if r.id == task]
        assert fences == sorted(set(fences))


def test_a_task_longer_than_its_ttl_keeps_its_lock_while_two_nodes_die(frail_shop):
    frail_shop.open(ttl=RENEWED)
    long = frail_shop.publish("keep", "it", 5)
    began = frail_shop.started("keep it")["at"]
    for node in frail_shop.nodes[:2]:
        node.kill()
    # What is shown is that time passes and the lock stays.
    eventually(lambda: recording.now() > began + 1.1 * RENEWED, "end of the lease, unless renewed")
    assert frail_shop.publish("keep", "it", 0).get(timeout=100)["skipped"] == "conflict"
    assert long.get(timeout=100) >= 5


@pytest.mark.parametrize(
    ("pool", "task"),
    [
        ("prefork", "lose_asleep"),
        ("prefork", "lose_busy"),
        ("solo", "lose_asleep"),
        ("solo", "lose_busy"),
        ("threads", "lose_busy"),
    ],
)
def test_a_body_is_told_that_its_lock_is_lost(frail_shop, pool, task):
    frail_shop.open(ttl=LOST, pool=pool)
    result = frail_shop.publish(task, "it", 600.0)
    frail_shop.started("lose it")
    for node in frail_shop.nodes[:3]:
        node.kill()
    with pytest.raises(Exception, match="is lost") as failure:
        result.get(timeout=100)
    assert isinstance(failure.value, LockLost)
    assert failure.value.reason == "deadline"
    assert len(frail_shop.recorded("end")) == 1
    assert not frail_shop.recorded("swallowed")


def test_a_body_that_asked_for_a_warning_only_goes_on(frail_shop):
    worker = frail_shop.open(ttl=LOST)
    result = frail_shop.publish("lose_warned", "it", 600.0)
    frail_shop.started("lose it")
    for node in frail_shop.nodes[:3]:
        node.kill()
    assert result.get(timeout=100) is True
    worker.wait_for_log(r"Lock 'lose:it' is lost \(deadline\)")


def test_a_retry_is_never_refused_by_its_own_lock(shop):
    shop.open()
    assert shop.publish("again", 20).get(timeout=100) == 20
    runs = sorted(e["retries"] for e in shop.recorded("start"))
    assert runs == list(range(21))


def test_a_chain_of_one_lock_runs_to_its_end(shop):
    shop.open()
    links = chain(shop.task("link", 0), *(shop.task("link") for _ in range(14)))
    assert links.apply_async().get(timeout=100) == 15
    assert len(shop.recorded("start")) == 15


def test_a_chord_of_duplicates_ends(shop):
    shop.open(concurrency=4)
    members = [shop.task("bill", "same", 0.5) for _ in range(4)]
    values = chord(members)(shop.task("total")).get(timeout=100)
    assert len(values) == 4
    assert sum("billed" in value for value in values) >= 1
    assert all("billed" in value or value["skipped"] == "conflict" for value in values)
    assert not recording.overlaps(shop.recorded())


def test_every_way_out_of_a_body_gives_the_lock_back(shop):
    shop.open(concurrency=2)
    ways = ["ignore", "reject", "exit", "error", "replace", "0"]
    for way in ways:
        shop.publish("end", way, way)
    results = [
        shop.publish("end", f"soft {n}", "600", soft_time_limit=0.1 + n / 50, time_limit=200)
        for n in range(12)
    ]
    assert all_ready(results) == ["FAILURE"] * 12

    def all_have_ended():  # of the last ones some may never have begun, on a loaded machine
        ended = [event["name"] for event in shop.recorded("end")]
        begun = [event["name"] for event in shop.recorded("start")]
        return sorted(ended) == sorted(begun) and {f"end {way}" for way in ways} <= set(ended)

    eventually(all_have_ended, "end of each body", timeout=100)
    # Far below the TTL.
    assert shop.ttl >= 2 * 60
    eventually(lambda: not list(AllLocks(shop.urls, shop.rules)), "end of all locks", timeout=60)
