"""What a worker's timer holds for a message, and what is given to the pool before all others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.utils.timer2 import Timer as ThreadTimer
from kombu.asynchronous.semaphore import LaxBoundedSemaphore
from kombu.asynchronous.timer import Timer

from celery_redlock.task.worker.timer import ahead_of_others, find, take_out


def test_a_timer_is_searched_and_left_in_order():
    timer, requests = Timer(), [object() for _ in range(9)]
    for request in requests:
        timer.call_after(60, print, (request,))
    take_out(timer, find(timer, requests[4]))
    assert find(timer, requests[4]) is None
    etas = [scheduled.eta for scheduled in timer.queue]
    assert etas == sorted(etas)
    assert [scheduled.entry.args[0] for scheduled in timer.queue] == requests[:4] + requests[5:]
    assert timer._queue[0].entry.args == (requests[0],)


def test_what_a_timer_does_not_hold_is_not_found():
    timer = Timer()
    timer.call_after(60, print)
    timer.call_after(60, print, (object(),))
    assert find(timer, object()) is None


def test_a_timer_of_a_thread_is_searched_as_well():
    """Celery has one where no event loop is."""
    timer, request = ThreadTimer(), object()
    timer.schedule.call_after(60, print, (request,))
    take_out(timer, find(timer, request))
    assert len(timer) == 0
    assert not timer.mutex.locked()


def test_what_a_timer_runs_just_now_is_not_taken_out():
    """A timer with a thread may have it in hand: it would run twice."""
    timer, request = ThreadTimer(), object()
    timer.schedule.call_after(60, print, (request,))
    scheduled = find(timer, request)
    assert take_out(timer, scheduled)
    assert not take_out(timer, scheduled)


# -- ahead of others -----------------------------------------------------------------------


def is_word(item):
    """Return whether *item* came ahead of others; a number did not."""
    return isinstance(item, str)


def test_several_that_are_given_at_once_stay_in_their_order():
    semaphore, ran = LaxBoundedSemaphore(0), []
    for number in range(3):
        semaphore.acquire(ran.append, number)
    with ahead_of_others(SimpleNamespace(semaphore=semaphore), is_word):
        for word in ("first", "second"):
            semaphore.acquire(ran.append, word)
    for _ in range(5):
        semaphore.release()
    assert ran == ["first", "second", 0, 1, 2]


def test_who_came_ahead_before_stays_there():
    semaphore, ran = LaxBoundedSemaphore(0), []
    for number in range(2):
        semaphore.acquire(ran.append, number)
    for word in ("first", "second", "third"):
        with ahead_of_others(SimpleNamespace(semaphore=semaphore), is_word):
            semaphore.acquire(ran.append, word)
    for _ in range(5):
        semaphore.release()
    assert ran == ["first", "second", "third", 0, 1]


def test_where_a_process_is_free_nothing_changes_place():
    """What was given has begun; what waits, waits on in its order."""
    semaphore, ran = LaxBoundedSemaphore(1), []
    with ahead_of_others(SimpleNamespace(semaphore=semaphore), is_word):
        semaphore.acquire(ran.append, "woken")
    assert ran == ["woken"]
    assert not semaphore._waiting


@pytest.mark.parametrize(
    "worker",
    [None, SimpleNamespace(), SimpleNamespace(semaphore=None), SimpleNamespace(semaphore=object())],
)
def test_where_there_is_no_such_queue_it_runs_as_well(worker):
    """Threads and greenlets have none, nor has a worker that has ended."""
    ran = []
    with ahead_of_others(worker, is_word):
        ran.append("woken")
    assert ran == ["woken"]
