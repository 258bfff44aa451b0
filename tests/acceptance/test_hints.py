"""
Those who wait as messages in real workers: busy ones, forged headers, and places nobody released.

As in `test_queue`, a task that was refused comes by itself after ten minutes: what runs was woken.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis
from celery.utils import uuid

from celery_redlock import RedlockTask
from celery_redlock.lock.records import place_name
from celery_redlock.task.messages import waiting
from support.events import body, now, read
from support.stage import LASTING, stage
from support.stalls import Stalls
from support.waiting import eventually

#: How long a short body takes, and one of the backlog [s].
SHORT, LONG = 0.02, 0.3
#: How many wait behind one lock; how many tasks the broker has beside them; how many are forged.
BEHIND, BACKLOG, FORGED = 31, 70, 200
#: Longest that a released lock may be free while somebody waits for it [s], stalls aside.
IDLE = 2.0
PLACES = 8
#: Longest that anything may take [s].
SOON = 100.0


def declare(app):
    if "STAGE" in os.environ:  # in a worker, and not in this process, where other tests are run
        waiting.FIRST_BY_ITSELF = waiting.LONGEST_BY_ITSELF = 600
    options = {"ignore_result": True, "shared": False}
    locked = {"base": RedlockTask, "on_conflict": "queue", **options}

    @app.task(name="nap", lock_key="{name}", **locked)
    def nap(name, number=0):
        with body(os.environ["EVENTS"], name, number=number):
            time.sleep(SHORT)  # stands for work

    @app.task(name="decoy", lock_key="decoy {name} {number}", **locked)
    def decoy(name, number):
        with body(os.environ["EVENTS"], "decoy", number=number):
            pass

    @app.task(name="pooled", lock_key="places", lock_limit=PLACES, **locked)
    def pooled(name):
        gate = Path(os.environ["EVENTS"]).with_name("open")
        with body(os.environ["EVENTS"], name):
            ends = now() + SOON
            while not gate.exists() and now() < ends:
                time.sleep(0.02)

    @app.task(name="plain", **options)
    def plain(name, seconds=SHORT):
        with body(os.environ["EVENTS"], name):
            time.sleep(seconds)  # stands for work


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hints")
    with stage(__file__, folder, nodes=3, **LASTING) as it:
        it.numbers = itertools.count(1)
        yield it


class Crew:
    def __init__(self, it, **options):
        self.it, self.queue = it, f"hints-{next(it.numbers)}"
        self.worker = it.worker(**{"concurrency": 2, "args": ["-Q", self.queue], **options})
        self.publish("plain", "warm")
        self.ended("warm", 1)

    def publish(self, name, *args):
        self.it.task(name).apply_async(args, queue=self.queue)

    def forge(self, task, *args, **header):
        """Publish a message that says that it waits for a lock, and is to come much later."""
        task_id = uuid()
        message = self.it.app.amqp.as_task_v2(task_id, task, args=args, kwargs={}, countdown=600)
        forged = {"redlock": {"v": 1, "task_id": task_id, "waiting": {"times": 1, **header}}}
        with self.it.app.producer_pool.acquire(block=True) as producer:
            producer.publish(
                message.body,
                exchange="",
                routing_key=self.queue,
                serializer="json",
                headers={**message.headers, **forged},
                correlation_id=task_id,
            )

    def scheduled(self, count):
        def has_all():
            found = self.it.app.control.inspect(timeout=1).scheduled() or {}
            return sum(map(len, found.values())) >= count  # the workers of other tests have ended

        eventually(has_all, f"{count} messages that wait", timeout=SOON, every=0.2)

    def ended(self, name, count):
        def found():
            bodies = [one for one in self.it.bodies(name) if one.finished]
            return bodies if len(bodies) >= count else None

        return eventually(found, f"{count} bodies of {name!r}", timeout=SOON, every=0.05)


@pytest.fixture
def crew(it):
    crew = Crew(it)
    yield crew
    crew.worker.stop()


@contextmanager
def busy(crew):
    over = threading.Event()

    def feed():
        with redis.Redis.from_url(crew.it.broker.url) as client:
            while not over.is_set():
                for _ in range(BACKLOG - client.llen(crew.queue)):
                    crew.publish("plain", "backlog", LONG)
                over.wait(0.1)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        with redis.Redis.from_url(crew.it.broker.url) as client:
            eventually(lambda: client.llen(crew.queue) >= BACKLOG - 10, "a backlog")
        yield
    finally:
        over.set()
        feeder.join()
        with redis.Redis.from_url(crew.it.broker.url) as client:
            client.delete(crew.queue)


@pytest.mark.long
def test_a_busy_worker_runs_those_who_wait_as_soon_as_plain_tasks(it, crew):
    with ExitStack() as stack:
        with it.held("busy"):
            for number in range(BEHIND):
                crew.publish("nap", "busy", number)
            crew.scheduled(BEHIND)
            stack.enter_context(busy(crew))
        with Stalls() as stalls:
            released = now()
            behind = max(one.ended for one in crew.ended("busy", BEHIND)) - released
        published = now()
        for _ in range(BEHIND):
            crew.publish("plain", "in their place")
        plain = max(one.ended for one in crew.ended("in their place", BEHIND)) - published
    assert behind - stalls.longest <= 1.5 * plain, stalls.found


def idle_after(released, bodies):
    """Return for how long a lock was free at most, since it was released [s]."""
    moments = [(released, released), *((one.started, one.ended) for one in bodies)]
    return max(b[0] - a[1] for a, b in itertools.pairwise(moments))


def test_messages_that_name_the_lock_of_another_task_hold_nobody_up(it, crew):
    """They wait for nothing; the lock, once it is released, goes to those whose lock it is."""
    with it.held("forged"):
        for number in range(FORGED):
            crew.forge("decoy", "forged", number, name="forged", since=0)
        for number in range(3):
            crew.publish("nap", "forged", number)
        crew.scheduled(FORGED + 3)
        time.sleep(1.5)  # the nodes know of all who wait
    with Stalls() as stalls:
        released = now()
        idle = idle_after(released, crew.ended("forged", 3))
    assert idle - stalls.longest < IDLE, stalls.found


def test_a_message_that_says_how_many_places_its_lock_has_disturbs_nobody(it, crew):
    """A limit of 1,000 is read nowhere: nobody runs in vain, and an honest task is answered."""
    with it.held("limit"):
        for number in range(BEHIND):
            crew.publish("nap", "limit", number)
        crew.scheduled(BEHIND)
        time.sleep(1.5)  # the nodes know of all who wait
        crew.forge("nap", "limit", "forged", name="limit", since=0, limit=1000)
        crew.scheduled(BEHIND + 1)
        time.sleep(3)  # whoever looks every second has looked
        with Stalls() as stalls:
            asked = now()
            crew.publish("plain", "honest")
            (honest,) = crew.ended("honest", 1)
        assert honest.ended - asked - stalls.total < 5, stalls.found
        assert crew.worker.log().count("Queued task nap") <= BEHIND + 1
    crew.ended("limit", BEHIND + 1)


def test_a_message_that_says_it_waits_since_ever_passes_nobody(it, crew):
    """It waits since the nodes have known of it, however long that it says."""
    with it.held("since"):
        for number in range(5):
            crew.publish("nap", "since", number)
        crew.scheduled(5)
        time.sleep(1.5)  # the nodes know of all who wait
        crew.forge("nap", "since", "forged", name="since", since=0)
        crew.scheduled(6)
        time.sleep(1.5)  # and of this one
    crew.ended("since", 6)
    starts = [event for event in read(it.events, "start") if event["name"] == "since"]
    numbers = [event["number"] for event in starts]
    assert numbers.index("forged") >= 3, numbers  # best effort, as with those who are honest


def test_places_that_nobody_released_are_filled_at_once(it):
    """The keys of their holders, who were killed, are gone: not one a second."""
    crew, gate = Crew(it, pool="threads", concurrency=PLACES), it.events.with_name("open")
    keys = [f"redlock:lock:{place_name('places', place)}" for place in range(PLACES)]
    with ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis.from_url(node.url)) for node in it.nodes]
        for client, key in itertools.product(clients, keys):
            client.set(key, "f" * 40 + "{}", px=100_000)
        for _ in range(PLACES):
            crew.publish("pooled", "places")
        crew.scheduled(PLACES)
        time.sleep(1.5)  # the nodes know of all who wait
        with Stalls() as stalls:
            for client in clients:
                assert client.delete(*keys) == PLACES
            started = it.started("places", PLACES)
    gate.touch()
    crew.ended("places", PLACES)
    crew.worker.stop()
    assert started[-1].started - started[0].started - stalls.longest < IDLE, stalls.found
