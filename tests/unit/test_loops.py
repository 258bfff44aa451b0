"""Algorithms in an asyncio event loop: cancelled, dropped, and after their loop is closed."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from celery_redlock.lock.algorithm.effects import Ask, Send, Sleep
from celery_redlock.lock.loop_driver import LoopDriver, LoopWaiting
from celery_redlock.lock.nodes.loop_rounds import MOST_AT_ONCE, LoopRounds
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts import requests

REQUEST, UNDO = (requests.release_request(Rules(), "a", digit * 40) for digit in "12")


class Fanout:
    """Connections to a node that never answers."""

    labels, node_timeout, is_ready, problem = ("one",), 60.0, True, None

    def __init__(self):
        self.begun = []
        self.is_asked = asyncio.Event()

    def fileno(self):
        return 1

    def get_ready(self):
        if self.problem is not None:
            raise self.problem

    def begin(self, waiter):
        self.begun.append(waiter)
        self.is_asked.set()

    def end(self, waiter):
        self.begun.remove(waiter)

    def has_doubts(self):
        return False


@pytest.fixture
def driver(monkeypatch):
    told = []
    driver = LoopDriver(SimpleNamespace(tell=lambda *one: told.append(one[0])), Fanout())
    driver.told = told
    monkeypatch.setattr(LoopRounds, "watch", lambda _: None)  # there are no sockets
    return driver


def steps():
    """Ask, and undo that on any way out but a grant."""
    try:
        yield Ask(REQUEST)
    except GeneratorExit:
        raise
    except BaseException:
        yield Send(UNDO)
        raise


def test_a_coroutine_that_is_dropped_undoes_what_it_asked_for_and_closes(driver):
    """Another error than GeneratorExit would come out of `close()`, or out of the collector."""

    async def drop():
        dropped = driver.drive(steps())
        dropped.send(None)
        dropped.close()

    asyncio.run(drop())
    assert driver.told == [UNDO]


def test_so_does_one_whose_loop_is_closed(driver):
    loop = asyncio.new_event_loop()
    task = loop.create_task(driver.drive(steps()))
    task._log_destroy_pending = False  # as that is what this is about
    for _ in range(3):
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    task.get_coro().close()
    assert driver.told == [UNDO]


def test_a_task_that_is_cancelled_is_cancelled(driver):
    async def cancel():
        task = asyncio.ensure_future(driver.drive(steps()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert driver.told == [UNDO]


@pytest.mark.parametrize("turns", range(4))
def test_a_cancellation_that_comes_with_the_bell_is_not_lost(driver, turns):
    """As `asyncio.wait_for` would lose it before Python 3.12."""

    async def cancel():
        waiting = LoopWaiting(b"line", 0.0)

        def wait():
            yield Sleep(3600.0, waiting)
            yield Send(UNDO)

        task = asyncio.ensure_future(driver.drive(wait()))
        await asyncio.sleep(0.01)
        waiting.wake(0.0)
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.done():  # or the bell was quicker
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancel())


def test_one_that_waits_is_woken_sooner_than_it_was_told_first():
    async def wait():
        waiting = LoopWaiting(b"line", 0.0)
        task = asyncio.ensure_future(waiting.wait_in_loop(3600.0))
        await asyncio.sleep(0)
        waiting.wake(600.0)
        await asyncio.sleep(0.01)
        waiting.wake(0.0)
        return await asyncio.wait_for(task, 60)

    assert asyncio.run(wait())


def test_one_that_is_to_register_again_sleeps_no_longer():
    async def wait():
        waiting = LoopWaiting(b"line", 0.0)
        task = asyncio.ensure_future(waiting.wait_in_loop(3600.0))
        await asyncio.sleep(0.01)
        assert not task.done()
        waiting.register_again()
        return await asyncio.wait_for(task, 60)

    assert not asyncio.run(wait())


def test_a_loop_that_is_closed_amid_a_question_is_forgotten(driver):
    loops = []

    async def ask():
        loops.append(weakref.ref(asyncio.get_running_loop()))
        task = asyncio.ensure_future(driver.ask(Ask(REQUEST)))
        await asyncio.sleep(0.01)
        assert not task.done()

    for _ in range(3):
        asyncio.run(ask())
    driver._fanout.begun.clear()  # as the waits are over
    gc.collect()
    assert [one() is None for one in loops] == [True, True, False]


def test_what_thousands_ask_at_once_waits_for_its_turn(driver):
    """All at once, the last would be late before they are sent."""

    async def ask():
        tasks = [asyncio.ensure_future(driver.ask(Ask(REQUEST))) for _ in range(MOST_AT_ONCE + 7)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks)
        return sum(len(waiter.rounds) for waiter in driver._fanout.begun)

    assert asyncio.run(ask()) == MOST_AT_ONCE


def test_connecting_does_not_wait_for_the_loops_own_threads(driver):
    """They may be busy for long, and by then the grant would be too late."""

    async def ask(let_go):
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, let_go.wait)
        try:
            asking = asyncio.ensure_future(driver.ask(Ask(REQUEST)))
            await asyncio.wait_for(driver._fanout.is_asked.wait(), 60)
        finally:
            let_go.set()
            await busy
            asking.cancel()

    driver._fanout.is_ready = False
    asyncio.run(ask(threading.Event()))


def test_without_a_thread_for_connecting_the_nodes_are_asked_as_they_are(driver, monkeypatch):
    """As at a limit of processes; and those who come later wait for no thread that never was."""
    driver._fanout.is_ready = False

    def start(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)

    async def ask():
        for number in (1, 2):
            task = asyncio.ensure_future(driver.ask(Ask(REQUEST)))
            while len(driver._fanout.begun) < number:  # noqa: ASYNC110  no event tells of it
                await asyncio.sleep(0)
            assert not task.done()

    asyncio.run(ask())


def test_what_goes_wrong_in_the_thread_is_raised_where_it_is_waited_for(driver):
    driver._fanout.is_ready = False
    driver._fanout.problem = LookupError
    for _ in range(2):
        with pytest.raises(LookupError):
            asyncio.run(driver.ask(Ask(REQUEST)))
