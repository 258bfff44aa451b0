"""
A failure that RabbitMQ brings back.

Rejected, it goes to a queue of dead letters, and from there to where it came from. Celery rejects
it with ``acks_late`` and ``acks_on_failure=False``, up to 5.6 ``acks_on_failure_or_timeout=False``.
"""

from __future__ import annotations

import os

import pytest
from celery import Task
from kombu import Exchange, Queue

from celery_redlock import RedlockTask
from celery_redlock.task.execution import outcome
from support.events import body, read
from support.stage import stage
from support.waiting import eventually

#: How often a task runs in all: the last time it succeeds.
TIMES = 3
#: What has Celery reject the message of a task that fails.
NOT_ACKNOWLEDGED = {
    "acks_on_failure" if hasattr(Task, "acks_on_failure") else "acks_on_failure_or_timeout": False
}
#: How long a dead letter waits [ms].
WAIT = 300


def fail_at_first(self, name):
    events = os.environ["EVENTS"]
    with body(events, name):
        runs = len([event for event in read(events, "start") if event["name"] == name])
    if runs < TIMES:
        raise ValueError(runs)
    return runs


def declare(app):
    shop = app.conf.task_default_queue
    buried = {"x-dead-letter-exchange": f"graves-{shop}"}
    app.conf.task_queues = [Queue(shop, Exchange(shop), shop, queue_arguments=buried)]
    for name, base in (("plain", Task), ("protected", RedlockTask)):
        app.task(
            name=name,
            base=base,
            bind=True,
            shared=False,
            acks_late=True,
            **NOT_ACKNOWLEDGED,
        )(fail_at_first)
    if os.environ.get("BROKEN"):
        outcome.acknowledges_failure = lambda *_: True


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_a_failure_that_is_rejected_comes_back_until_it_succeeds(rabbit, tmp_path, on):
    """Celery has not acknowledged it, so it is not over: a lock changes nothing about that."""
    # What a worker of the other test had not acknowledged at its end is delivered again.
    shop = f"shop-{tmp_path.name}"
    conf = {"task_default_queue": shop, "redlock_node_timeout": 1.0}
    with stage(__file__, tmp_path, nodes=3, broker_url=rabbit.url, **conf) as it:
        back = {"x-message-ttl": WAIT, "x-dead-letter-exchange": shop}
        with it.app.connection_for_write() as connection:
            graves = f"graves-{shop}"
            Queue(graves, Exchange(graves), shop, queue_arguments=back)(connection).declare()
        it.worker(concurrency=2, env={} if on else {"BROKEN": "yes"})
        plain, ours = (it.task(name).apply_async((name,)) for name in ("plain", "protected"))
        eventually(lambda: it.meta(plain.id).get("status") == "SUCCESS", "success")
        if on:
            eventually(lambda: it.meta(ours.id).get("status") == "SUCCESS", "success")
        else:
            it.wait_for_log(rf"{ours.id}\] has finished before", timeout=60)
        assert len(it.bodies("plain")) == TIMES
        ran = len(it.bodies("protected"))
        # One whose result could not be stored at once has run again without any dead letter.
        assert ran == TIMES if on else ran < TIMES
