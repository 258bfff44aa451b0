"""A signal at whatever line of ours that a delivery runs through leaves nothing behind."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading

import pytest

from celery_redlock.errors import LockLost
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.algorithm.results import ReleaseOutcome
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.scripts.requests import Marker
from celery_redlock.reading.health import connect
from celery_redlock.task.execution import execution, start
from celery_redlock.task.execution.execution import latest_execution
from resources.deliveries import SIGNALS, execution_of, handled, shop
from resources.remains import SOON
from resources.strikes import UNHARMED, Strikes

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs signals"),
    pytest.mark.timeout(900),  # five seconds each, unless the machine is busy with a lot else
]


#: What is raised while Python frees an object is lost, whoever raises it.
FINALISERS = ("__del__", "is_green")


@pytest.fixture
def opened(five_nodes, caplog):
    caplog.set_level(logging.CRITICAL)  # thousands of failures, all of them wanted
    with contextlib.ExitStack() as stack:
        stack.enter_context(handled())
        rules = stack.enter_context(shop(five_nodes, acks_late=True))
        rival = Redlock([node.url for node in five_nodes], rules[0].locks.rules)
        stack.callback(rival.close)
        connect(rival, 60.0)
        yield *rules, rival


def nothing(shop, rival):
    return lambda: None


def taken(shop, rival):
    lease = rival.acquire(shop.name, wait=60)

    def end():
        assert rival.release(lease) is not ReleaseOutcome.EXPIRED

    return end


def delivered_again(shop, rival):
    info = {"task_id": shop.name, "execution": execution_of(shop.name)}
    held = rival.take(LockRequest(shop.name, 100.0, 60.0, info=info))

    def end():
        held.ensure_held()
        rival.give_back(held)

    return end


def finished(shop, rival):
    rival.mark(Marker(execution_of(shop.name), "done", 100.0), wait=True)
    shop.app.backend.store_result(shop.name, "first", "SUCCESS")
    return lambda: None


def struck(opened, name, before, *, seconds=SOON):
    shop, remains, rival = opened
    strikes = Strikes(
        lambda: signal.raise_signal(getattr(signal, name)),
        visits=1,
        at=lambda place: place.function not in FINALISERS,
    )
    before(shop, rival)()  # starts its watchdog
    remains.remember()
    unharmed = 0
    while unharmed < UNHARMED:
        shop.next_name()
        after = before(shop, rival)
        one = strikes.once(shop.deliver)
        after()  # raises if the other's lock is gone
        problems = [*shop.problems(), *remains.of(shop.name, seconds)]
        if one is None:
            assert problems == []
            unharmed += 1
        else:
            yield one, problems


@pytest.mark.parametrize(
    ("name", "before", "least"),
    [
        ("SIGUSR1", nothing, 500),
        ("SIGINT", taken, 400),
        ("SIGUSR1", delivered_again, 400),
        ("SIGTERM", finished, 300),
    ],
)
def test_a_signal_at_any_line_of_a_delivery_leaves_nothing_behind(opened, name, before, least):
    """
    A soft time limit, a stop or Ctrl-C: the lock is free at once, and what holds is held.

    It is raised, as soon as our own I/O is over: nothing that a signal raises is swallowed but a
    soft time limit, which Celery stores as the task's failure. Nothing counts as done whose result
    is not stored, no signal stays masked, and nobody else's lock is touched.
    """
    found = list(struck(opened, name, before))
    assert len(found) > least
    left = [f"{one.place}: {problems}" for one, problems in found if problems]
    assert not left, "\n".join(left)
    raised = {type(one.error) for one, _ in found}
    assert raised == ({type(None)} if name == "SIGUSR1" else {SIGNALS[name]})


def test_without_our_deferral_a_signal_leaves_a_lock(opened, monkeypatch):
    """The same check finds the lock that is left when signals strike into our I/O."""
    for module in (execution, start):
        monkeypatch.setattr(module, "defer_interrupts", contextlib.nullcontext)
    left = (problems for _, problems in struck(opened, "SIGTERM", nothing, seconds=0.3) if problems)
    assert next(left, None) is not None


def lose():
    running = latest_execution.get()
    if running is not None and not running.interrupt._mutex._is_owned():
        running.interrupt.fire()


def test_a_lock_lost_at_any_line_of_a_delivery_is_told_to_the_body_or_to_nobody(opened):
    """In a pool of threads: `LockLost` is the task's failure, or it had succeeded before."""
    shop, remains, _ = opened
    outcomes, left = [], []

    def work():
        remains.remember()
        strikes, unharmed = Strikes(lose, visits=1), 0
        while unharmed < UNHARMED:
            shop.next_name()
            one = strikes.once(shop.deliver)
            unharmed += one is None
            if one is not None:
                result = shop.app.AsyncResult(shop.name)
                outcomes.append(type(result.result) if result.failed() else result.state)
                problems = [*shop.problems(), *remains.of(shop.name)]
                if one.error is not None or problems:
                    left.append(f"{one.place}: {one.error!r} {problems}")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not left, "\n".join(left)
    assert set(outcomes) == {"SUCCESS", LockLost}
