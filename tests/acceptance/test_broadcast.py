"""A task that is broadcast: every worker runs it, one after the other, and its copies stay few."""

from __future__ import annotations

import os
import time

import pytest
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_redlock import RedlockTask, Reschedule
from support.events import body, overlaps, read
from support.stage import stage
from support.versions import since
from support.waiting import eventually

QUORUM = since(5, 6, "the broker holds back what waits for a quorum queue")
WORKERS = 3
RULES = {"redlock_ttl": 120.0, "redlock_max_ttl": 120.0, "redlock_node_timeout": 1.0}
HOSTS = [f"w{number}@localhost" for number in range(WORKERS)]


def declare(app):
    events, kind = Exchange("events", type="fanout"), app.conf.task_default_queue_type
    app.conf.task_default_queue = f"celery-{kind}"
    app.conf.task_queues = (
        Queue(f"celery-{kind}", queue_arguments={"x-queue-type": kind}),
        Broadcast("all"),
        Queue("mail", events),
        Queue("bill", events),
    )
    often = Reschedule(base=1.0, cap=1.0)
    options = {"bind": True, "base": RedlockTask, "shared": False, "lock_key": "{lock}"}

    def reload(self, lock):
        with body(os.environ["EVENTS"], lock, host=self.request.hostname):
            time.sleep(0.8)  # for the copies of others to come meanwhile

    app.task(name="reload", on_conflict=often, **options)(reload)
    app.task(name="reload_or_skip", on_conflict="skip", **options)(reload)

    def again(self, lock):
        with body(os.environ["EVENTS"], lock, host=self.request.hostname):
            if self.request.retries < 1:
                raise self.retry(countdown=1, max_retries=1)

    app.task(name="again", on_conflict=often, **options)(again)


@pytest.fixture(scope="module", params=["redis", "rabbitmq", pytest.param("quorum", marks=QUORUM)])
def it(request, tmp_path_factory):
    folder, url = tmp_path_factory.mktemp("broadcast"), {}
    if request.param != "redis":
        url = {"broker_url": request.getfixturevalue("rabbit").url}
    if request.param == "quorum":  # of any queue: then the broker holds back what is to come later
        url["task_default_queue_type"] = "quorum"
    with stage(__file__, folder, nodes=3, **RULES, **url) as it:
        it.kind, queues = request.param, it.app.conf.task_default_queue_type
        for number in range(WORKERS):
            it.worker(name=f"w{number}", concurrency=1, args=["-Q", f"celery-{queues},all"])
        # A worker is ready before it hears what is broadcast over Redis, which keeps nothing.
        sent = []
        eventually(lambda: is_heard_by_all(it, sent), "a broadcast in each", timeout=100, every=0.5)
        yield it


def is_heard_by_all(it, sent):
    """Broadcast once more, and return whether all workers have received one of those *sent*."""
    sent.append(it.task("reload_or_skip").apply_async(("heard",), **to_all(it)).id)
    return any(received(it, one) >= WORKERS for one in sent)


def to_all(it):
    """Return options of a publish; Celery declares no broadcast, and Redis would drop it."""
    queue = it.app.amqp.queues["all"]
    return {"queue": queue, "declare": [queue.exchange]}


def hosts_of(it, name):
    return [event["host"] for event in read(it.events, "start") if event["name"] == name]


def received(it, task_id):
    return it.log().count(f"[{task_id}] received")


def put_off(it, task_id):
    return it.log().count(f"Task reload[{task_id}] ignored")


def test_every_worker_runs_it_once(it):
    """Who finds the lock taken comes again in its own worker, and in no other."""
    result = it.task("reload").apply_async(("all",), **to_all(it))
    eventually(lambda: len(hosts_of(it, "all")) >= WORKERS, "a body in each", timeout=100)
    it.wait_until_free()
    before = received(it, result.id)
    if it.kind != "redis":  # each copy goes to the queue that it came by, and to no other
        assert before == WORKERS + put_off(it, result.id)
    time.sleep(2.5)  # longer than a copy waits
    assert sorted(hosts_of(it, "all")) == HOSTS
    assert received(it, result.id) == before
    assert overlaps(e for e in read(it.events) if e.get("name") == "all") == []


def test_a_conflict_may_be_skipped(it):
    result = it.task("reload_or_skip").apply_async(("some",), **to_all(it))
    ended = f"[{result.id}] succeeded"
    eventually(lambda: it.log().count(ended) >= WORKERS, "an end in each", timeout=100)
    assert 1 <= len(hosts_of(it, "some")) <= WORKERS
    assert received(it, result.id) == WORKERS


def test_a_retry_is_run_by_the_worker_that_asked_for_it(it):
    it.task("again").apply_async(("twice",), **to_all(it))
    eventually(lambda: len(hosts_of(it, "twice")) >= 2 * WORKERS, "both runs", timeout=100)
    time.sleep(2.5)  # a third run would come in that time
    hosts = hosts_of(it, "twice")
    assert {host: hosts.count(host) for host in hosts} == dict.fromkeys(HOSTS, 2)


@pytest.fixture
def shared(rabbit, tmp_path):
    with stage(__file__, tmp_path, nodes=3, **RULES, broker_url=rabbit.url) as it:
        for number, queue in enumerate(("mail", "mail", "bill")):
            it.worker(name=f"s{number}", concurrency=1, args=["-Q", queue])
        yield it


def test_a_queue_that_workers_share_has_one_execution(shared):
    """It is put off to that queue, for whichever of them: none drops it as another's."""
    for number in range(4):
        with shared.held(f"event {number}"):
            task = shared.task("reload").apply_async((f"event {number}",), queue="mail")
            eventually(
                lambda task=task: put_off(shared, task.id) >= 2, "a put-off of each", timeout=100
            )
    for number in range(4):
        eventually(
            lambda number=number: len(hosts_of(shared, f"event {number}")) >= 2,
            "a body for each queue",
            timeout=100,
        )
    time.sleep(2.5)  # longer than a copy waits
    for number in range(4):
        hosts = hosts_of(shared, f"event {number}")
        assert len(hosts) == 2
        assert "s2@localhost" in hosts
