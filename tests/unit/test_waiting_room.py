"""Tasks that wait for their locks in a worker's main process: who is woken, and who is let go."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from datetime import datetime, timedelta, timezone
from functools import partial
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.worker.request import create_request_cls
from celery.worker.state import revoked, revoked_stamps
from kombu.asynchronous.semaphore import LaxBoundedSemaphore
from kombu.asynchronous.timer import Timer
from kombu.common import QoS

from celery_redlock import RedlockTask
from celery_redlock.events import TasksWaiting
from celery_redlock.lock import clock
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.votes import Vote, VoteKind
from celery_redlock.lock.waiting.waiting import LEAVE, NO_CHANNEL, WAIT
from celery_redlock.plugin import plugin_for
from celery_redlock.task.messages.delivery import Delivery
from celery_redlock.task.worker import registration, waiting_room, waiting_task
from celery_redlock.task.worker.forced_ends import RedlockRequest
from celery_redlock.task.worker.timer import find, take_out
from celery_redlock.task.worker.waiting_room import room_of
from celery_redlock.task.worker.wake_tasks import WakeTasks
from support.fakes import Ears
from support.waiting import eventually


class AtOnce:
    """A thread that has done what it is to do when it has started."""

    def __init__(self, target, name, daemon):
        self.start = target
        assert daemon


@pytest.fixture
def app(monkeypatch):
    """
    The app of a worker, and all that it tells the nodes.

    Of each lock that they are asked about, they say that so many places of it are *free*.
    """
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.redlock_nodes = ["redis://one:1/0"]
    app.told, app.free, app.noting = [], 0, []
    plugin = plugin_for(app)
    app.ears = Ears()

    def vote(request):
        free = app.free if request.keys[4:] else 0
        now = clock.wall()
        waited = now - int(request.arguments[3]) / 1000.0
        return Vote(VoteKind.GRANTED, amount=free, ttl=waited, node_now=now)

    app.vote = vote

    def ask_all(asked):
        app.told += [ask.request for ask in asked]
        app.noting.append(len(asked))
        return [[app.vote(ask.request)] for ask in asked]

    driver = SimpleNamespace(tell=app.told.append, ask_all=ask_all)
    plugin._locks = SimpleNamespace(listener=app.ears, rules=Rules(), driver=driver)
    monkeypatch.setattr(registration, "threading", SimpleNamespace(Thread=AtOnce))

    @app.task(name="bill", base=RedlockTask, shared=False, lock_key="{lock}", on_conflict="queue")
    def bill(lock):
        return lock

    app.ran = []
    app.consumer = SimpleNamespace(
        app=app,
        timer=Timer(),
        qos=QoS(lambda prefetch_count: None, 4, max_prefetch=10),
        pool=SimpleNamespace(num_processes=1, apply_async=lambda *_, **__: None),
    )
    app.room = room_of(app)
    app.room.open(app.consumer)
    heard, bell = os.pipe()
    os.set_blocking(bell, False)
    app.room.ring(bell)
    yield app
    app.room.ring(None)
    os.close(heard)
    os.close(bell)
    revoked.discard("me")
    revoked_stamps.clear()
    app.close()


def receive(app, lock="a", *, name=None, since=1.7e9, eta=True, expires=None, task_id="me", **said):
    waits = said.pop("waits", True)
    waiting = {"name": name or lock, "since": since, "times": 1}
    waiting |= {part: said.pop(part) for part in ("woken", "limit") if part in said}
    in_a_while = datetime.now(timezone.utc) + timedelta(minutes=1)
    headers = {
        "id": task_id,
        "task": "bill",
        "lang": "py",
        "retries": 0,
        "redlock": {"v": 1, "task_id": task_id, "id": "0" * 32, **said},
        "eta": in_a_while.isoformat() if eta else None,
        "expires": expires,
    }
    if waits:
        headers["redlock"].setdefault("waiting", waiting)
    message = SimpleNamespace(
        headers=headers,
        body=b"",
        payload=[[lock], {}, {}],
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={"routing_key": "celery"},
        properties={"correlation_id": task_id, "reply_to": "somebody"},
        acknowledged=False,
    )
    task = app.tasks["bill"]
    made = create_request_cls(RedlockRequest, task, app.consumer.pool, "w@h", None, app=app)
    request = made(message, app=app, task=task, on_ack=lambda *_: app.ran.append("ack"))
    if eta:
        app.consumer.timer.call_after(60, app.ran.append, (request,))
    return request


def told(app):
    """Return what the nodes were told since this was asked last; "aside": one without a channel."""
    words = []
    for request in app.told:
        if request.script is LEAVE:
            words.append("leave")
        else:
            assert request.script is WAIT
            words.append("aside" if request.arguments[1] == NO_CHANNEL.encode() else "wait")
    app.told.clear()
    return words


def who_was_told_of(app):
    found = [request.arguments[0].decode() for request in app.told]
    app.told.clear()
    return found


def who(request):
    return request._delivery.execution


def call(app, lock="a"):
    """Hear that a lock was released, and have the worker's event loop wake who is to be."""
    app.ears.hear(lock)
    app.room.wake()


def was_woken(request):
    fields = request.request_dict
    return Delivery.of(request.task, fields, request.hostname).was_woken


def later(app, seconds):
    for task in app.room._waiting:
        task.registered_at -= seconds


def test_how_many_wait_is_told_where_that_has_changed(app, monkeypatch):
    heard = []
    monkeypatch.setattr(app.room._plugin, "notify", heard.append, raising=False)
    requests = [receive(app, lock) for lock in "ab"]
    app.room.look()
    app.room.look()
    assert heard == [TasksWaiting("bill", 2)]
    requests[0].wait_no_more()
    app.room.look()
    requests[1].wait_no_more()
    app.room.look()
    assert heard[1:] == [TasksWaiting("bill", 1), TasksWaiting("bill", 0)]


# -- coming and going ----------------------------------------------------------------


def test_one_that_waits_is_noted(app):
    request = receive(app, since=1.7e9)
    (wait,) = app.told
    assert wait.keys == (
        *(b"redlock:line:a", b"redlock:waiters:a", b"redlock:node:boot"),
        *(b"redlock:node:quarantine", b"redlock:lock:a"),
    )
    assert wait.arguments[:4] == (who(request).encode(), b"c" * 16, b"0001", b"1700000000000")
    assert len(app.ears.waiting) == 1


@pytest.mark.parametrize(
    "said",
    [
        {"woken": False},  # it has waited for the lock before, which is free by now
        {"eta": False},  # only what Celery holds back can be woken
        *({"since": never} for never in ("1", -1.0, 1e300, float("nan"), None, True)),  # not ours
    ],
    ids=str,
)
def test_what_does_not_wait_for_the_lock_is_not_woken(app, said):
    """Twin: the test above."""
    receive(app, **said)
    assert (told(app), app.ears.waiting) == ([], [])


def test_where_nobody_hears_the_nodes_nobody_waits(app):
    """As with nodes in memory: the task comes by itself."""
    app.room._plugin.locks.listener = None
    receive(app)
    app.room.look()
    assert told(app) == []


@pytest.mark.parametrize("own", [True, False])
def test_a_broadcast_copy_waits_in_one_worker(app, own):
    """All get it; in the others it would be counted, and woken in vain."""
    name = receive(app).hostname
    told(app)
    receive(app, worker=name if own else "another")
    assert told(app) == ["wait"] * own


# -- what a message says is not believed ------------------------------------------------


def test_a_message_that_names_another_lock_than_its_task_does_waits_for_none(app):
    """Anybody can publish it: it would be in the line of that lock, and get its hints."""
    request = receive(app, "a", name="b")
    assert (told(app), app.ears.waiting) == ([], [])
    call(app, "b")
    call(app, "a")
    assert app.ran == []
    assert request._waits_as is None


def test_how_many_places_a_lock_has_says_the_task(app):
    """Not the message: a larger limit would have it told of places that it cannot have."""
    app.tasks["bill"].lock_limit = 2
    receive(app, limit=9)
    (wait,) = app.told
    assert wait.arguments[2] == b"0002"
    assert wait.keys[4:] == (b"redlock:lock:a", b"redlock:lock:a#1")


# -- locks can be granted again ---------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "runs"),
    [
        ({"reschedules": 1}, True),
        ({"reschedules": 0}, False),
        ({"reschedules": 1, "eta": False}, False),
    ],
    ids=str,
)
def test_one_that_was_rescheduled_runs_when_locks_can_be_granted_again(app, said, runs):
    """Whatever put it off; one that comes by itself, or was put off by its caller, waits on."""
    request = receive(app, waits=False, **said)
    app.room.wake_rescheduled()
    app.room.wake()
    app.room.wake_rescheduled()
    app.room.wake()
    assert app.ran == [request] * runs
    assert (find(app.consumer.timer, request) is None) == (runs or not request.eta)


def test_of_many_that_were_rescheduled_some_run_at_once(app, monkeypatch):
    """To find one in the timer takes longer the more there are; the others come by themselves."""
    monkeypatch.setattr(waiting_room, "MOST_AT_ONCE", 3)
    requests = [receive(app, waits=False, reschedules=1, task_id=str(n)) for n in range(5)]
    app.room.wake_rescheduled()
    app.room.wake()
    assert len(app.ran) == 3
    assert set(app.ran) < set(requests)


@pytest.mark.parametrize("is_safe", [True, False])
def test_one_may_be_rescheduled_while_others_are_woken(app, monkeypatch, is_safe):
    """By the thread that receives messages; another watches the nodes, and wakes."""
    began, is_noted = threading.Event(), threading.Event()

    class Seen(weakref.WeakSet):
        def __iter__(self):
            for one in super().__iter__():
                yield one
                began.set()
                is_noted.wait(0.2 if is_safe else 60)  # with the mutex it cannot come meanwhile

    monkeypatch.setattr(app.room, "_rescheduled", Seen())
    if not is_safe:
        monkeypatch.setattr(app.room, "_mutex", contextlib.nullcontext())
    requests = [receive(app, waits=False, reschedules=1, task_id=str(n)) for n in range(2)]

    def reschedule():
        began.wait()
        app.room.note_rescheduled(app)
        is_noted.set()

    thread = threading.Thread(target=reschedule)
    thread.start()
    with contextlib.nullcontext() if is_safe else pytest.raises(RuntimeError, match="size"):
        app.room.wake_rescheduled()
    thread.join()
    app.room.wake()
    assert set(app.ran) == (set(requests) if is_safe else set())


def test_one_that_cannot_be_run_early_keeps_no_other_from_it(app, monkeypatch, caplog):
    requests = [receive(app, waits=False, reschedules=1, task_id=str(n)) for n in range(2)]
    taken = iter([OSError("the broker is gone"), None])

    def take_out_once(*given):
        error = next(taken)
        if error is not None:
            raise error
        return take_out(*given)

    monkeypatch.setattr(waiting_room, "take_out", take_out_once)
    app.room.wake_rescheduled()
    app.room.wake()
    assert len(app.ran) == 1
    assert app.ran[0] in requests
    assert "A task that was rescheduled was not run" in caplog.text


# -- being woken ------------------------------------------------------------------------


def test_one_that_is_woken_runs(app):
    request, other = receive(app, "a"), receive(app, "b", task_id="other")
    told(app)
    call(app)
    assert app.ran == [request]
    assert was_woken(request)
    assert app.told[0].arguments[0].decode() == who(request)
    assert told(app) == ["aside"]
    assert [scheduled.entry.args for scheduled in app.consumer.timer.queue] == [(other,)]
    assert [waiting.request for waiting in app.ears.waiting] == [other]
    call(app)
    assert app.ran == [request]


def test_a_hint_that_counts_later_wakes_later(app):
    """The other nodes may not have heard of the release yet: they would refuse it."""
    request = receive(app)
    (waiting,) = app.ears.waiting
    waiting.wake(5.0)
    app.room.wake()
    assert app.ran == []
    soonest = app.consumer.timer.queue[0]
    soonest.entry.fun(*soonest.entry.args)
    assert app.ran == [request]


def test_the_next_hint_is_the_next_one_s(app):
    """Both places of a lock are released at once, before the event loop has come to it."""
    first, second = receive(app, since=1001.0), receive(app, since=1002.0, task_id="other")
    app.ears.hear("a")
    app.ears.hear("a")
    app.room.wake()
    assert app.ran == [first, second]


def test_the_one_runs_that_a_node_has_taken_out_of_its_line(app):
    """Or it would be in no line, though it may be the oldest by the clock of another worker."""
    first, second = receive(app, since=1001.0), receive(app, since=1002.0, task_id="other")
    app.ears.hear("a", taken=who(second))
    app.room.wake()
    assert app.ran == [second]
    app.ears.hear("a", taken=who(first))
    app.room.wake()
    assert app.ran == [second, first]


def test_one_that_cannot_be_run_disturbs_nobody(app, monkeypatch):
    receive(app, since=1001.0)
    other = receive(app, since=1002.0, task_id="other")
    note = waiting_room.note_woken

    def fail_once(*arguments):
        monkeypatch.setattr(waiting_room, "note_woken", note)
        raise OSError

    monkeypatch.setattr(waiting_room, "note_woken", fail_once)
    app.ears.hear("a")
    app.ears.hear("a")
    app.room.wake()
    assert app.ran == [other]


def test_one_that_could_not_be_run_is_tried_again(app, monkeypatch):
    """At the next look, and not only when it comes by itself."""
    request = receive(app)

    def fail(*_arguments):
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(waiting_room, "find", fail)
        call(app)
    assert app.ran == []
    app.free = 1
    app.room.look()
    app.room.wake()
    assert app.ran == [request]


def test_one_that_comes_by_itself_is_woken_no_more(app):
    """The nodes remember since when it waits: its lock may be refused once more."""
    request = receive(app)
    told(app)
    request.execute_using_pool(None)
    assert told(app) == ["aside"]
    assert not was_woken(request)
    assert app.ears.waiting == []
    request.execute_using_pool(None)
    assert told(app) == []


def test_one_whose_message_is_gone_is_not_run(app):
    """A hint may come before that is noticed."""
    request = receive(app)
    app.consumer.timer.clear()
    del request
    gc.collect()
    call(app)
    assert app.ran == []


def test_one_that_is_woken_before_it_is_in_the_timer_is_woken_again(app):
    """With Celery events and greenlets others run between the two."""
    request = receive(app)
    app.consumer.timer.clear()
    told(app)
    call(app)
    assert (told(app), app.ran) == ([], [])
    app.consumer.timer.call_after(60, app.ran.append, (request,))
    app.room.look()
    assert told(app) == ["wait"]
    call(app)
    assert app.ran == [request]


def test_also_if_it_is_not_the_oldest(app):
    """The hint has had the nodes take it out of the line."""
    receive(app, since=1001.0)
    request = receive(app, since=1002.0, task_id="other")
    take_out(app.consumer.timer, find(app.consumer.timer, request))
    app.ears.hear("a")
    call(app)
    app.consumer.timer.call_after(60, app.ran.append, (request,))
    app.told.clear()
    app.room.look()
    assert who_was_told_of(app) == [who(request)]


def test_one_that_waits_for_its_rate_limit_lets_others_pass(app):
    """It came by itself, and every hint would be lost on it; twin: the one above."""
    first = receive(app, since=1001.0)
    other = receive(app, since=1002.0, task_id="other")
    take_out(app.consumer.timer, find(app.consumer.timer, first))
    call(app)
    told(app)
    app.room.look()
    assert who_was_told_of(app) == [who(first), who(other)]
    assert [waiting.request for waiting in app.ears.waiting] == [other]
    call(app)
    assert app.ran == [other]


def test_one_that_is_woken_comes_before_what_waits_for_a_process(app):
    """The lock would be free for as long as all that the worker has prefetched takes."""
    semaphore, plain = LaxBoundedSemaphore(1), SimpleNamespace(request_dict={})
    woken = [receive(app, lock, task_id=lock) for lock in ("a", "b")]
    semaphore.acquire(app.ran.append, "runs")
    semaphore.acquire(app.ran.append, plain)
    app.consumer.controller = SimpleNamespace(semaphore=semaphore)
    for lock, request in zip(("a", "b"), woken, strict=True):
        find(app.consumer.timer, request).entry.fun = partial(semaphore.acquire, app.ran.append)
        call(app, lock)
    for _ in range(3):
        semaphore.release()
    assert app.ran == ["runs", *woken, plain]


def test_a_pool_that_may_grow_does_so_for_one_that_is_woken(app):
    """With ``--autoscale``: Celery adds processes for messages that it receives, or in a while."""
    request, grown = receive(app), []
    scaler = SimpleNamespace(maybe_scale=lambda: grown.append(list(app.ran)))
    app.consumer.controller = SimpleNamespace(autoscaler=scaler)
    call(app)
    assert grown == [[request]]


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_one_that_was_woken_and_is_not_to_run_waits_no_more(app, how):
    """Celery looks whether it is to run; twin: before that, the nodes remember it."""
    past = datetime.now(timezone.utc) - timedelta(seconds=1)
    request = receive(app, expires=past.isoformat() if how == "expired" else None)
    call(app)
    assert told(app) == ["wait", "aside"]
    if how == "revoked":
        assert not request.revoked()
        assert told(app) == []
        revoked.add("me")
    assert request.revoked()
    assert told(app) == ["leave"]


def test_a_node_that_cannot_be_told_does_not_disturb_celery(app):
    """The worker's own work goes on; the nodes forget it by themselves."""
    request = receive(app)

    def fail(_request):
        msg = "no way"
        raise OSError(msg)

    app.room._plugin.locks.driver.tell = fail
    revoked.add("me")
    assert request.revoked()
    revoked.discard("me")
    third = receive(app, task_id="third")
    third.execute_using_pool(None)
    receive(app, task_id="fourth").execute_using_pool(None)


def test_one_that_may_not_wait_tries_at_once(app):
    """Its policy ends it, unless the lock is free: nobody else would wake it."""
    app.vote = lambda _: Vote(VoteKind.REFUSED)
    request = receive(app)
    app.room.wake()
    assert app.ran == [request]


# -- where the lock is free already ---------------------------------------------------------


def test_one_whose_lock_is_free_runs_at_once(app):
    """It was released while the message was on its way, and nobody sends a hint any more."""
    app.free = 1
    request = receive(app)
    app.room.wake()
    assert app.ran == [request]
    assert was_woken(request)
    assert told(app) == ["wait", "aside"]


def test_one_whose_lock_becomes_free_without_a_hint_runs_soon(app):
    """The lease of a dead holder lapses; or the hint was lost."""
    request = receive(app)
    app.room.look()
    app.room.wake()
    assert app.ran == []
    app.free = 1
    app.room.look()
    app.room.wake()
    assert app.ran == [request]


def test_the_oldest_runs_whoever_asked(app):
    """It has waited longer than the one that came just now and found the lock free."""
    oldest = receive(app, since=1001.0)
    app.free = 1
    receive(app, since=1002.0, task_id="other")
    app.room.wake()
    assert app.ran == [oldest]


def test_as_many_run_as_places_are_free(app):
    app.tasks["bill"].lock_limit = 3
    requests = [receive(app, since=since, task_id=f"{since}") for since in (1001.0, 1002.0, 1003.0)]
    app.free = 2
    app.room.look()
    app.room.wake()
    assert app.ran == requests[:2]


@pytest.mark.parametrize("how", ["begun", "gone", "held up"])
def test_one_that_was_woken_and_waits_for_a_process_is_to_have_the_lock(app, how, monkeypatch):
    """
    Else a busy worker would have all of them come at once, to be refused but for one.

    Not for long: it may be held up by a rate limit of its own.
    """
    # However slow the machine is: only "held up" is about the end of that time.
    monkeypatch.setattr(waiting_task, "TAKES_TO_BEGIN", 3600.0)
    app.free = 1
    first = receive(app, since=1001.0)
    app.room.wake()
    other = receive(app, since=1002.0, task_id="other")
    elsewhere = receive(app, "b", task_id="elsewhere")
    receive(app, since=1003.0, task_id="third")
    for app.free in (1, 0, 1):
        app.room.look()
        app.room.wake()
        assert app.ran == [first, elsewhere]
    kept = [first] if how != "gone" else []
    if how == "begun":
        first.time_start = 1.0
    if how == "held up":
        monkeypatch.setattr(waiting_task, "TAKES_TO_BEGIN", 0.0)
    del first, app.ran[:]
    gc.collect()
    app.room.look()
    app.room.wake()
    assert app.ran == [other]
    del kept


def test_one_that_waits_for_a_release_asks_for_no_free_lock(app):
    """It would have one that it cannot use yet, and again; a release is heard as by any."""
    app.free = 1
    request = receive(app, woken="release")
    app.room.look()
    app.room.wake()
    assert app.ran == []
    assert [wait.keys[4:] for wait in app.told] == [()]
    call(app)
    assert app.ran == [request]


def test_one_that_waits_for_a_release_keeps_no_free_place_from_others(app):
    """It may wait for long: for a run of its own on another place."""
    app.tasks["bill"].lock_limit = 2
    first = receive(app, since=1001.0, woken="release")
    other = receive(app, since=1002.0, task_id="other")
    app.told.clear()
    app.free = 1
    app.room.look()
    assert who_was_told_of(app)[:1] == [who(other)]
    app.room.wake()
    assert app.ran == [other]
    app.room.look()
    assert who_was_told_of(app) == [who(other)]  # as it left
    assert first not in app.ran


def test_what_the_nodes_are_asked_holds_up_no_message(app, monkeypatch):
    """A node may be down: a thread waits for it, and then asks for all that came meanwhile."""
    started = []

    def not_yet(target, **_):
        return SimpleNamespace(start=lambda: started.append(target))

    monkeypatch.setattr(registration, "threading", SimpleNamespace(Thread=not_yet))
    for lock in "abc":
        receive(app, lock, task_id=lock)
    assert told(app) == []
    (work,) = started
    work()
    assert app.noting == [3]
    assert told(app) == ["wait"] * 3
    receive(app, "d", task_id="d")  # the twin: that one has ended
    assert len(started) == 2


def test_where_no_thread_can_be_started_the_next_look_tells_the_nodes(app, monkeypatch):
    def refuse():
        raise RuntimeError("can't start new thread")

    no_thread = SimpleNamespace(Thread=lambda **_: SimpleNamespace(start=refuse))
    with monkeypatch.context() as patch:
        patch.setattr(registration, "threading", no_thread)
        request = receive(app)
    assert told(app) == []
    app.room.look()
    assert set(who_was_told_of(app)) == {who(request)}


def test_a_failure_to_ask_is_told_and_costs_nobody_else(app, monkeypatch, caplog):
    def fail(_asked):
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(app.room._plugin.locks.driver, "ask_all", fail)
        receive(app)
    assert "The nodes may not know of tasks that wait" in caplog.text
    app.room.look()
    assert told(app) == ["wait"]


def test_one_that_left_while_it_was_noted_is_in_no_line(app, monkeypatch):
    """The note may have come after what it left with, and a hint would be lost on it."""
    request, driver = receive(app), app.room._plugin.locks.driver
    ask_all = driver.ask_all

    def ask_meanwhile(asked):
        request.wait_no_more()
        return ask_all(asked)

    monkeypatch.setattr(driver, "ask_all", ask_meanwhile)
    told(app)
    app.free = 1
    app.room.look()
    assert told(app) == ["aside", "wait", "leave"]
    app.room.wake()
    assert app.ran == []


# -- where there is no event loop ---------------------------------------------------------


def test_without_an_event_loop_a_task_is_run_as_well(app):
    """By a thread of ours: Celery's timer sleeps for up to a second."""
    app.room.ring(None)
    request = receive(app)
    app.ears.hear("a")
    assert eventually(lambda: app.ran, "task that ran") == [request]


def test_there_one_that_waits_for_the_pool_is_in_nobodys_way(app):
    """One of greenlets may be full, and each of them wait for a lock in this process."""
    app.room.ring(None)
    is_free, request = threading.Event(), receive(app)
    scheduled = find(app.consumer.timer, request)
    scheduled.entry.fun = lambda it: (is_free.wait(60), app.ran.append(it))
    app.ears.hear("a")
    eventually(lambda: find(app.consumer.timer, request) is None, "task that waits for the pool")
    waiting = app.ears.enter_thread(b"redlock:line:b", 1.0)
    app.ears.hear("b")
    app.ears.leave(waiting)
    assert app.ran == []
    is_free.set()
    assert eventually(lambda: app.ran, "task that ran") == [request]


def test_there_two_hints_at_once_run_it_once(app, monkeypatch):
    """Each in a thread of its own; here they meet as both have found it in the timer."""
    request, both = receive(app), threading.Barrier(2)
    (waiting,) = app.ears.waiting

    def find_together(*arguments):
        found = find(*arguments)
        both.wait(60)
        return found

    monkeypatch.setattr(waiting_room, "find", find_together)
    threads = [threading.Thread(target=app.room._run, args=(waiting,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert app.ran == [request]


# -- who is told of -------------------------------------------------------------------


def test_the_oldest_of_each_lock_is_noted_again_and_again(app):
    """That wakes it where a lease lapsed; the others only now and then, or it would be a flood."""
    requests = [
        receive(app, "a", since=1002.0, task_id="1"),
        receive(app, "a", since=1001.0, task_id="2"),
        receive(app, "b", since=1003.0, task_id="3"),
    ]
    app.told.clear()
    app.room.look()
    assert set(who_was_told_of(app)) == {who(requests[1]), who(requests[2])}
    later(app, 2 * waiting_room.NOTED_EVERY)
    app.room.look()
    assert told(app) == ["wait"] * 3
    app.room.look()
    assert told(app) == ["wait"] * 2


def test_a_thread_that_waits_in_the_process_is_older_than_a_task(app):
    """There is one room for both: it comes by itself, and the task need not."""
    receive(app, since=1002.0)
    waiting = app.ears.enter_thread(b"redlock:line:a", 1001.0)
    told(app)
    app.room.look()
    assert told(app) == []
    app.ears.leave(waiting)
    app.room.look()
    assert told(app) == ["wait"]


def test_all_are_noted_again_once_a_node_can_be_heard(app, monkeypatch):
    """With the next looks, some at a time, in the order in which they were; none is run."""
    monkeypatch.setattr(registration, "MOST_AT_ONCE", 2)
    requests = [receive(app, since=1001.0 + i, task_id=str(i)) for i in range(5)]
    now = time.monotonic()  # one for all: they did not come at once on a slow machine
    for task, ago in zip(app.room._waiting, (1.0, 5.0, 4.0, 3.0, 2.0), strict=True):
        task.registered_at = now - ago
    app.told.clear()
    app.ears.room.register_all()
    app.room.wake()
    noted = []
    for _ in range(3):
        app.room.look()
        noted.append([request.arguments[0].decode() for request in app.told])
        app.told.clear()
    first, second, third, fourth, fifth = map(who, requests)
    assert noted == [[second, third], [fourth, fifth], [first]]
    app.room.look()
    assert who_was_told_of(app) == [first]
    assert app.ran == []


def test_many_locks_are_noted_a_part_at_a_time(app, monkeypatch):
    """Longest ago first: those of thousands of locks would cost a worker much."""
    monkeypatch.setattr(registration, "MOST_AT_ONCE", 2)
    for number in range(5):
        receive(app, f"{number}", task_id=f"{number}")
    app.told.clear()
    seen = []
    for _ in range(5):
        app.room.look()
        seen += who_was_told_of(app)
    assert len(seen) == 10
    assert seen[:5] == seen[5:]
    assert len(set(seen)) == 5


def test_all_are_noted_before_the_nodes_forget_them(app, monkeypatch):
    """However many they are: the number at once grows with them."""
    monkeypatch.setattr(registration, "MOST_AT_ONCE", 1)
    for module in (registration, waiting_room):
        monkeypatch.setattr(module, "NOTED_EVERY", 4.0)
    for number in range(9):
        receive(app, "a", task_id=f"{number}")
    later(app, 5.0)
    app.told.clear()
    found = set()
    for _ in range(3):
        app.room.look()
        assert len(app.told) == 3
        found |= set(who_was_told_of(app))
    assert len(found) == 9


@pytest.mark.parametrize("how", ["revoked", "revoked by a stamp", "expired", "gone"])
def test_who_is_not_to_run_waits_no_more(app, how):
    """And Celery ends it as soon as that is known, not when it would have come by itself."""
    past = datetime.now(timezone.utc) - timedelta(seconds=1)
    request = receive(app, expires=past.isoformat() if how == "expired" else None)
    other = receive(app, "b", task_id="other")
    told(app)
    if how == "revoked":
        revoked.add("me")
    elif how == "revoked by a stamp":
        request.request_dict.update({"stamped_headers": ["tenant"], "stamps": {"tenant": ["acme"]}})
        revoked_stamps["tenant"] = ["acme"]
    elif how == "gone":
        app.consumer.timer.clear()
        app.consumer.timer.call_after(60, app.ran.append, (other,))
        del request
        gc.collect()
    app.room.look()
    assert told(app) == ["leave", "wait"]
    if how != "gone":
        assert request._already_revoked
        assert waiting_room.find(app.consumer.timer, request) is None
    app.room.look()
    assert told(app) == ["wait"]
    assert app.ran == ([] if how == "gone" else ["ack"])  # by no process of the pool


# -- Celery's limit ----------------------------------------------------------------------


def test_those_who_wait_do_not_count_for_the_limit(app, monkeypatch):
    monkeypatch.setattr(waiting_room, "UNCOUNTED", 3)
    qos = app.consumer.qos
    for number in range(5):
        receive(app, task_id=f"{number}")
        assert qos.max_prefetch == 10 + min(number + 1, 3)
        qos.increment_eventually()
    assert qos.value == 9
    call(app)
    assert qos.max_prefetch == 13
    app.room.clear()
    assert qos.max_prefetch == 10
    assert app.ears.waiting == []


def test_one_that_has_come_by_itself_and_is_revoked_is_left_to_celery(app):
    """It looks before it runs what has left its timer; the limit is as if it had run."""
    qos, request = app.consumer.qos, receive(app)
    qos.increment_eventually()
    app.consumer.timer.clear()
    revoked.add("me")
    app.room.look()
    assert told(app) == ["wait", "aside"]
    assert app.ran == []
    assert qos.max_prefetch == 10
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(None)
    assert told(app) == ["leave"]
    assert qos.max_prefetch == 10


def test_a_new_connection_counts_anew(app):
    """Celery makes another limit for it, of which nothing was taken away."""
    receive(app)
    app.room.clear()
    app.consumer.qos = QoS(lambda prefetch_count: None, 4, max_prefetch=10)
    app.room.open(app.consumer)
    receive(app, task_id="other")
    assert app.consumer.qos.max_prefetch == 11


def test_without_a_limit_there_is_nothing_to_count(app):
    app.consumer.qos.max_prefetch = None
    receive(app)
    assert app.consumer.qos.max_prefetch is None


# -- the step of the consumer ----------------------------------------------------------------


def test_a_bell_rings_in_the_event_loop(app):
    """The listener's thread touches nothing of the worker's; the loop does, when it is woken."""
    step, readers = WakeTasks(app.consumer), {}
    step.start(app.consumer)
    hub = SimpleNamespace(add_reader=lambda end, answer: readers.update({end: answer}))
    step.register_with_event_loop(app.consumer, hub)
    first, second = receive(app, "a", task_id="1"), receive(app, "b", task_id="2")
    app.ears.hear("a")
    app.ears.hear("b")
    assert app.ran == []
    (answer,) = readers.values()
    answer()
    assert app.ran == [first, second]
    receive(app, task_id="3")
    told(app)
    step.stop(app.consumer)
    assert told(app) == ["aside"]
    assert app.ears.waiting == []
    step.stop(app.consumer)


def test_a_bell_that_rings_already_is_enough(app):
    """A loop that is busy for long fills no pipe."""
    step = WakeTasks(app.consumer)
    step.start(app.consumer)
    step.register_with_event_loop(app.consumer, SimpleNamespace(add_reader=lambda *_: None))
    receive(app)
    (waiting,) = app.ears.waiting
    for _ in range(70_000):
        waiting.wake(0.0)
    step.stop(app.consumer)
