"""Tasks that wait for their locks in a worker's main process: tickets, turns, and who is let go."""

from __future__ import annotations

import gc
import time
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.utils.timer2 import Timer as ThreadTimer
from celery.worker.request import create_request_cls
from celery.worker.state import reserved_requests, revoked
from kombu.asynchronous.timer import Timer
from kombu.common import QoS

from celery_redlock import RedlockTask
from celery_redlock.events import TasksWaiting
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts import RELEASE
from celery_redlock.lock.waiting import LEAVE, WAIT, Ticket
from celery_redlock.plugin import plugin_for
from celery_redlock.task import waiting_room
from celery_redlock.task.delivery import TURN
from celery_redlock.task.forced_ends import RedlockRequest
from celery_redlock.task.timer import find, take_out
from celery_redlock.task.waiting_room import room_of
from celery_redlock.task.wake_tasks import WakeTasks
from support.fakes import Ears

NAMES = {WAIT: "wait", LEAVE: "leave", RELEASE: "release"}


@pytest.fixture
def app():
    """The app of a worker, and all that it tells the nodes."""
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.redlock_nodes = ["redis://one:1/0"]
    app.told = []
    plugin = plugin_for(app)
    plugin._locks = SimpleNamespace(
        listener=Ears(), rules=Rules(), driver=SimpleNamespace(tell=app.told.append)
    )

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
    yield app
    revoked.discard("me")
    app.close()


def receive(
    app, lock="a", *, since=1.7e9, woken=True, eta=True, expires=None, task_id="me", **said
):
    """Return a delivery of a task that waits; the worker holds it in its timer."""
    waiting = {"name": lock, "since": since, "times": 1, "woken": woken}
    in_a_while = datetime.now(timezone.utc) + timedelta(minutes=1)
    headers = {
        "id": task_id,
        "task": "bill",
        "lang": "py",
        "retries": 0,
        "redlock": {"v": 1, "task_id": task_id, "id": "0" * 32, "waiting": waiting, **said},
        "eta": in_a_while.isoformat() if eta else None,
        "expires": expires,
    }
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
    """Return what the nodes were told since this was asked last."""
    names = [
        "hand on" if request.script is LEAVE and len(request.keys) > 2 else NAMES[request.script]
        for request in app.told
    ]
    app.told.clear()
    return names


def call(app, request):
    """Tell that the turn of *request* has come."""
    room = app.room
    room._plugin.locks.listener.expected[request._ticket.token](b"redlock:lock:" + lock_of(request))


def lock_of(request):
    """Return the name of the lock that a task waits for."""
    return request._delivery.envelope.waiting.name.encode()


def test_how_many_wait_is_told_where_that_has_changed(app, monkeypatch):
    """At a look, once a second; nobody is told again of what is as it was."""
    heard = []
    monkeypatch.setattr(app.room._plugin, "notify", heard.append, raising=False)
    requests = [receive(app, lock) for lock in "ab"]
    app.room.look()
    app.room.look()
    assert heard == [TasksWaiting("bill", 2)]
    app.room.leave(requests[0]._ticket.token)
    app.room.look()
    app.room.leave(requests[1]._ticket.token)
    app.room.look()
    assert heard[1:] == [TasksWaiting("bill", 1), TasksWaiting("bill", 0)]


# -- coming and going ----------------------------------------------------------------


def test_one_that_waits_for_something_else_gets_none(app):
    """It has waited for the lock before, which is free by now; twin: the test below."""
    assert receive(app, woken=False)._ticket is None
    assert told(app) == []


def test_one_that_waits_gets_a_ticket(app):
    """Its token begins with the owner, so that the parent can release for the child."""
    request = receive(app, since=1.7e9)
    assert len(request._ticket.token) == 40
    assert request._ticket.token.startswith(request._delivery.owner)
    assert list(app.room._plugin.locks.listener.expected) == [request._ticket.token]
    (wait,) = app.told
    assert wait.keys[1] == b"redlock:ready:a"
    assert wait.arguments[1].startswith(request._ticket.token.encode() + b"c" * 16)
    assert wait.arguments[2] == b"1700000000000"


def test_what_is_to_run_now_or_does_not_wait_gets_none(app):
    """Only what Celery holds back can be woken."""
    assert receive(app, eta=False)._ticket is None
    assert told(app) == []


@pytest.mark.parametrize("own", [True, False])
def test_a_broadcast_copy_waits_in_one_worker(app, own):
    """All get it; in the others it would be counted, and woken in vain."""
    name = receive(app).hostname
    assert (receive(app, worker=name if own else "another")._ticket is not None) is own


def test_whose_turn_has_come_runs_with_its_ticket(app):
    """Out of the timer, once; the nodes forget a ticket that only a majority had called."""
    request, other = receive(app, "a"), receive(app, "b", task_id="other")
    told(app)
    call(app, request)
    assert app.ran == [request]
    assert request.request_dict["delivery_info"][TURN] == f"{request._ticket.token}#0"
    assert told(app) == ["leave"]
    assert [scheduled.entry.args for scheduled in app.consumer.timer.queue] == [(other,)]
    assert list(app.room._plugin.locks.listener.expected) == [other._ticket.token]


def test_a_place_that_a_ticket_does_not_know_is_the_child_s_to_judge(app):
    """The limit was raised since, or is that of another task: what runs knows the limit of now."""
    request, other = receive(app), receive(app, task_id="other")
    heard = app.room._plugin.locks.listener.expected
    heard[request._ticket.token](b"redlock:lock:a#7")
    assert request.request_dict["delivery_info"][TURN] == f"{request._ticket.token}#7"
    heard[other._ticket.token](b"what nobody of ours has said")
    assert app.ran == [request, other]


def test_one_that_cannot_be_run_disturbs_nobody(app, monkeypatch):
    """It comes by itself; the next one runs, and so does the worker's event loop."""
    request, other = receive(app), receive(app, task_id="other")
    tokens = [one._ticket.token for one in (request, other)]
    app.room.ring(None)
    app.room._turns.extend((token, b"redlock:lock:a") for token in tokens)
    one_way = waiting_room.give_turn

    def fail_once(*arguments):
        monkeypatch.setattr(waiting_room, "give_turn", one_way)
        raise OSError

    monkeypatch.setattr(waiting_room, "give_turn", fail_once)
    app.room.wake()
    assert app.ran == [other]


def test_one_that_comes_by_itself_takes_its_ticket_along(app):
    """Nobody hands a lock to it any more, as it asks for it with a token of its own."""
    request = receive(app)
    told(app)
    request.execute_using_pool(None)
    assert told(app) == ["hand on"]
    request.execute_using_pool(None)
    assert told(app) == []


def test_one_whose_message_is_gone_hands_on(app):
    """What was kept for it goes to the next one at once."""
    request = receive(app)
    token, heard = request._ticket.token, app.room._plugin.locks.listener.expected
    app.consumer.timer.clear()
    del request
    gc.collect()
    told(app)
    heard[token](b"redlock:lock:a")
    assert told(app) == ["hand on"]
    assert app.ran == []


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_one_that_was_woken_and_is_not_to_run_hands_on(app, how):
    """Else the others would wait for what was kept for it; twin: one that runs keeps it."""
    past = datetime.now(timezone.utc) - timedelta(seconds=1)
    request = receive(app, expires=past.isoformat() if how == "expired" else None)
    call(app, request)
    told(app)
    if how == "revoked":
        assert not request.revoked()
        assert told(app) == []
        revoked.add("me")
    assert request.revoked()
    assert told(app) == ["hand on"]


def test_a_node_that_cannot_be_told_does_not_disturb_celery(app, monkeypatch):
    """The worker's own work goes on; the ticket ends by itself."""
    request = receive(app)

    def fail(_request):
        msg = "no way"
        raise OSError(msg)

    other = receive(app, task_id="other")
    app.room._plugin.locks.driver.tell = fail
    revoked.add("me")
    assert request.revoked()
    assert receive(app, task_id="third")._ticket is None
    call(app, other)
    assert app.ran[-1] is other


# -- those that cannot run yet ----------------------------------------------------------


def pass_time(app, *, at_most=100):
    """Do what the timer holds for a moment from now, in its order."""
    timer = app.consumer.timer
    for _ in range(at_most):
        soon = [one for one in timer.queue if one.eta < time.monotonic() + 1]
        if not soon:
            return
        take_out(timer, soon[0])
        soon[0].entry.fun(*soon[0].entry.args)
    raise AssertionError("there is no end to it")


@pytest.fixture
def busy(app):
    """Another task, which has the only process."""
    other = receive(app, eta=False, task_id="busy")
    reserved_requests.add(other)
    yield other
    reserved_requests.discard(other)


def test_one_that_is_woken_before_it_is_in_the_timer_runs_when_it_is(app):
    """With Celery events and greenlets others run between the two."""
    request = receive(app)
    app.consumer.timer.clear()
    told(app)
    call(app, request)
    assert (told(app), app.ran) == ([], [])
    app.consumer.timer.call_after(60, app.ran.append, (request,))
    pass_time(app)
    assert app.ran == [request]
    assert request.request_dict["delivery_info"][TURN] == f"{request._ticket.token}#0"
    assert told(app) == ["leave"]


def test_twin_one_that_is_never_in_the_timer_lets_others_pass(app):
    """It has another turn later, with another ticket of the same owner."""
    request = receive(app)
    first = request._ticket
    app.consumer.timer.clear()
    told(app)
    call(app, request)
    pass_time(app)
    assert told(app) == ["hand on", "wait"]
    assert request._ticket.token != first.token
    assert request._ticket.token.startswith(request._delivery.owner)
    assert request._ticket.waits == first.waits
    assert list(app.room._plugin.locks.listener.expected) == [request._ticket.token]
    app.room.look()
    assert tokens(app) == {request._ticket.token}


def test_what_ends_in_a_moment_is_waited_for(app, busy):
    """It may be the very holder whose release wakes the next: its process is free in a moment."""
    request = receive(app)
    told(app)
    call(app, request)
    assert (told(app), app.ran) == ([], [])
    reserved_requests.discard(busy)
    pass_time(app)
    assert app.ran == [request]
    assert told(app) == ["leave"]


def test_one_that_no_process_can_take_lets_others_pass(app, busy):
    """And those behind it in this worker do at once; twin: with a process it ran above."""
    first, second = receive(app), receive(app, task_id="other")
    told(app)
    call(app, first)
    pass_time(app)
    assert told(app) == ["hand on", "wait"]
    call(app, second)
    assert told(app) == ["hand on", "wait"]
    app.room.look()
    assert (told(app), app.ran) == ([], [])
    reserved_requests.discard(busy)
    app.room.look()
    assert tokens(app) == {first._ticket.token, second._ticket.token}
    call(app, first)
    assert app.ran == [first]


def test_while_it_lets_others_pass_it_counts_as_waiting(app, busy):
    """Its note stands; there is no ticket to wake it by."""
    request = receive(app)
    call(app, request)
    pass_time(app)
    note = app.told[-1]
    assert note.arguments[0] == request._ticket.waits
    assert note.arguments[1] == b""


def test_one_in_a_worker_that_is_always_busy_runs_when_it_is_woken_again(app, busy, monkeypatch):
    """It waits for a process then, as any message does."""
    monkeypatch.setattr(waiting_room, "PASSES_FOR", 0.0)
    request = receive(app)
    call(app, request)
    pass_time(app)
    told(app)
    app.room.look()
    assert told(app) == ["wait"]
    call(app, request)
    assert app.ran == [request]


def test_a_pool_that_has_stopped_takes_nothing(app):
    """Celery's has no number of processes any more; the timer still fires."""
    receive(app)
    told(app)
    app.consumer.pool = SimpleNamespace()
    app.room.look()
    assert told(app) == ["wait"]


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("most", [1, 2])
def test_a_pool_that_may_grow_does_so_for_one_that_is_woken(app, most):
    """With ``--autoscale``: Celery adds processes for messages that it receives, or in a while."""
    request, grown = receive(app), []
    scaler = SimpleNamespace(max_concurrency=most, maybe_scale=lambda: grown.append(list(app.ran)))
    app.consumer.controller = SimpleNamespace(autoscaler=scaler)
    call(app, request)
    assert app.ran == [request] * (most - 1)
    assert grown == [[request]] * (most - 1)


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("how", ["revoked", "by itself"])
def test_one_that_lets_others_pass_can_end_meanwhile(app, how):
    """With the ticket that it has now."""
    request = receive(app)
    call(app, request)
    pass_time(app)
    told(app)
    if how == "revoked":
        revoked.add("me")
        app.room.look()
    else:
        request.execute_using_pool(None)
    assert told(app) == ["hand on"]
    assert app.room._plugin.locks.listener.expected == {}
    assert app.room._passed == {}


# -- who is told of -------------------------------------------------------------------


def test_the_oldest_of_each_lock_is_told_of_again_and_again(app):
    """That wakes it where a lease lapsed; the others only now and then, or it would be a flood."""
    requests = [
        receive(app, "a", since=1002.0, task_id="1"),
        receive(app, "a", since=1001.0, task_id="2"),
        receive(app, "b", since=1003.0, task_id="3"),
    ]
    app.told.clear()
    app.room.look()
    assert tokens(app) == {requests[1]._ticket.token, requests[2]._ticket.token}
    later(app, 2 * waiting_room.TELL_EVERY)
    app.room.look()
    assert told(app) == ["wait"] * 3
    app.room.look()
    assert told(app) == ["wait"] * 2


def test_many_locks_are_told_of_in_turn(app, monkeypatch):
    """So many at once, longest ago first: those of thousands of locks would cost a worker much."""
    monkeypatch.setattr(waiting_room, "MOST_TOLD", 2)
    for number in range(5):
        receive(app, f"{number}", task_id=f"{number}")
    app.told.clear()
    seen = []
    for _ in range(5):
        app.room.look()
        seen += [request.arguments[1][:40] for request in app.told]
        assert told(app) == ["wait"] * 2
    assert seen[:5] == seen[5:]
    assert len(set(seen)) == 5


def test_all_are_told_of_before_the_nodes_forget_them(app, monkeypatch):
    """However many they are: the number at once grows with them."""
    monkeypatch.setattr(waiting_room, "MOST_TOLD", 1)
    monkeypatch.setattr(waiting_room, "TELL_EVERY", 4.0)
    for number in range(9):
        receive(app, "a", task_id=f"{number}")
    later(app, 5.0)
    app.told.clear()
    found = set()
    for _ in range(3):
        app.room.look()
        assert len(app.told) == 3
        found |= tokens(app)
    assert len(found) == 9


def tokens(app):
    """Return the tokens that the nodes were told of since this was asked last."""
    found = {request.arguments[1][:40].decode() for request in app.told}
    app.told.clear()
    return found


def later(app, seconds):
    """Have the nodes been told of all so long ago [s]."""
    app.room._told.update({token: at - seconds for token, at in app.room._told.items()})


@pytest.mark.parametrize("how", ["revoked", "expired", "gone"])
def test_who_is_not_to_run_waits_no_more(app, how):
    """And Celery ends it as soon as that is known, not when it would have come by itself."""
    past = datetime.now(timezone.utc) - timedelta(seconds=1)
    request = receive(app, expires=past.isoformat() if how == "expired" else None)
    other = receive(app, "b", task_id="other")
    told(app)
    if how == "revoked":
        revoked.add("me")
    elif how == "gone":
        app.consumer.timer.clear()
        app.consumer.timer.call_after(60, app.ran.append, (other,))
        del request
        gc.collect()
    app.room.look()
    assert told(app) == ["hand on", "wait"]
    if how != "gone":
        assert request._already_revoked
        assert waiting_room.find(app.consumer.timer, request) is None
    app.room.look()
    assert told(app) == ["wait"]
    assert app.ran == ([] if how == "gone" else ["ack"])  # by no process of the pool


# -- Celery's limit ----------------------------------------------------------------------


def test_those_who_wait_do_not_count_for_the_limit(app, monkeypatch):
    """Up to a bound; all of it is taken back when they are gone."""
    monkeypatch.setattr(waiting_room, "UNCOUNTED", 3)
    qos, requests = app.consumer.qos, []
    for number in range(5):
        requests.append(receive(app, task_id=f"{number}"))
        assert qos.max_prefetch == 10 + min(number + 1, 3)
        qos.increment_eventually()
    assert qos.value == 9
    call(app, requests[0])
    assert qos.max_prefetch == 13
    app.room.clear()
    assert qos.max_prefetch == 10
    assert app.room._plugin.locks.listener.expected == {}


def test_one_that_has_come_by_itself_and_is_revoked_counts_until_celery_ends_it(app):
    """An increment meanwhile would be cut, and its value shrink."""
    qos, request = app.consumer.qos, receive(app)
    qos.increment_eventually()
    app.consumer.timer.clear()
    revoked.add("me")
    app.room.look()
    assert told(app) == ["wait", "hand on"]
    assert qos.max_prefetch == 11
    with pytest.raises(TaskRevokedError):
        request.execute_using_pool(None)
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
    """Celery's default."""
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
    first, second = receive(app, task_id="1"), receive(app, task_id="2")
    call(app, first)
    call(app, second)
    assert app.ran == []
    (answer,) = readers.values()
    answer()
    assert app.ran == [first, second]
    third = receive(app, task_id="3")
    told(app)
    step.stop(app.consumer)
    assert told(app) == ["hand on"]
    assert third._ticket.token not in app.room._plugin.locks.listener.expected
    step.stop(app.consumer)


def test_a_bell_that_rings_already_is_enough(app):
    """A loop that is busy for long fills no pipe."""
    step = WakeTasks(app.consumer)
    step.start(app.consumer)
    step.register_with_event_loop(app.consumer, SimpleNamespace(add_reader=lambda *_: None))
    for _ in range(70_000):
        app.room._call("nobody", b"")
    step.stop(app.consumer)


def test_a_timer_is_searched_and_left_in_order(app):
    """What is taken out is gone at once; all others come when they are due."""
    timer, requests = app.consumer.timer, [receive(app, task_id=f"{number}") for number in range(9)]
    take_out(timer, find(timer, requests[4]))
    assert find(timer, requests[4]) is None
    etas = [scheduled.eta for scheduled in timer.queue]
    assert etas == sorted(etas)
    assert [scheduled.entry.args[0] for scheduled in timer.queue] == requests[:4] + requests[5:]
    assert timer._queue[0].entry.args == (requests[0],)


def test_a_timer_of_a_thread_is_searched_as_well(app):
    """Celery has one where no event loop is."""
    timer, request = ThreadTimer(), receive(app, eta=False)
    timer.schedule.call_after(60, app.ran.append, (request,))
    take_out(timer, find(timer, request))
    assert len(timer) == 0
    assert not timer.mutex.locked()


def test_a_ticket_has_two_names():
    """What it is known by does not change with what wakes it; a name that is too long is cut."""
    ticket = Ticket("a", "w" * 32, 1.7e9, {"task": "bill"}, "t" * 40, "c" * 16)
    assert ticket.waits == Ticket("a", "w" * 32, 1.7e9, {"task": "bill"}).waits
    assert ticket.wakes.startswith(b"t" * 40 + b"c" * 16 + b"{")
    assert Ticket("a", "w" * 32, 1.7e9, {}).wakes == b""
