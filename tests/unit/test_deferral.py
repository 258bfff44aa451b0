"""Signals that are held back arrive later, once, and are not held for ever by somebody's I/O."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from celery_redlock.process import deferral
from celery_redlock.process.deferral import allow_signals, defer_signals
from support.waiting import eventually

SIGNAL, OTHER = signal.SIGUSR1, signal.SIGTERM
#: How long a body is let hang, and how long one would hang: longer than a test waits [s].
PATIENCE, LONGEST = 0.05, 600.0


class Stop(BaseException):
    """What a handler raises to end what hangs."""


class Inbox:
    """Handlers of two signals, which note what `came` through, and raise `error`."""

    def __init__(self):
        self.came = []
        self.error = None

    def handle(self, number, frame):
        self.came.append(number)
        if self.error is not None:
            raise self.error


@pytest.fixture
def inbox():
    inbox = Inbox()
    before = {number: signal.signal(number, inbox.handle) for number in (SIGNAL, OTHER)}
    yield inbox
    for number, handler in before.items():
        signal.signal(number, handler)


class Late(threading.Timer):
    """Goes off when it is cancelled: its thread had ended its wait, and was not run since."""

    def run(self):
        self.finished.wait()
        time.sleep(PATIENCE)
        self.function(*self.args, **self.kwargs)


def test_an_alarm_that_cannot_be_called_off_brings_no_signal_twice(inbox, monkeypatch):
    """Late by as little as it likes, it would find the handlers of before in their places."""
    monkeypatch.setattr(deferral.threading, "Timer", Late)
    others = set(threading.enumerate())
    with defer_signals(), defer_signals(max_wait=LONGEST):
        signal.raise_signal(SIGNAL)
    eventually(lambda: set(threading.enumerate()) <= others, "end of the alarm")
    assert inbox.came == [SIGNAL]


@pytest.mark.parametrize("number", deferral.DEFERRED)
def test_whatever_ends_a_task_is_held_until_the_end(number):
    came = []

    def handler(number, _frame):
        came.append(number)

    before = signal.signal(number, handler)
    try:
        with defer_signals():
            signal.raise_signal(number)
            assert came == []
        assert came == [number]
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_different_signals_are_all_held(inbox):
    inbox.error = Stop()
    with pytest.raises(Stop), defer_signals():
        signal.raise_signal(SIGNAL)
        signal.raise_signal(OTHER)
        assert inbox.came == []
    assert sorted(inbox.came) == sorted([SIGNAL, OTHER])


def test_a_pause_inside_of_two_deferrals_is_ended_by_a_signal(inbox):
    """Whoever sleeps there holds nothing that could be lost, however deep that is."""
    inbox.error = Stop()
    with pytest.raises(Stop), defer_signals(), defer_signals():
        signal.raise_signal(SIGNAL)
        deferral.pause(LONGEST)
    assert inbox.came == [SIGNAL]
    assert signal.getsignal(SIGNAL) == inbox.handle


def test_an_inner_deferral_hands_over_to_the_outer_one(inbox):
    with defer_signals():
        with defer_signals():
            signal.raise_signal(SIGNAL)
        assert inbox.came == []
    assert inbox.came == [SIGNAL]


@pytest.mark.parametrize("is_early", [True, False])
def test_patience_ends(inbox, is_early):
    """What hangs is stopped after that time by a signal that came before or meanwhile, once."""
    with defer_signals():
        if is_early:
            signal.raise_signal(SIGNAL)
        began = time.monotonic()
        with defer_signals(max_wait=PATIENCE):
            if not is_early:
                signal.raise_signal(SIGNAL)
            eventually(lambda: inbox.came, "the signal")
        assert time.monotonic() - began > PATIENCE / 2
        assert inbox.came == [SIGNAL]
    assert inbox.came == [SIGNAL]


def test_a_handler_that_raises_stops_what_hangs(inbox):
    inbox.error = Stop()
    with pytest.raises(Stop), defer_signals(), defer_signals(max_wait=PATIENCE):
        signal.raise_signal(SIGNAL)
        threading.Event().wait(LONGEST)
        pytest.fail("nothing stopped it")
    assert inbox.came == [SIGNAL]
    assert signal.getsignal(SIGNAL) == inbox.handle


def test_a_signal_is_let_through_at_once_when_patience_is_over(inbox):
    with defer_signals(), defer_signals(max_wait=0.0):
        signal.raise_signal(SIGNAL)
        assert inbox.came == [SIGNAL]
    assert inbox.came == [SIGNAL]


def test_after_that_a_signal_is_held_again(inbox):
    """What follows is our own I/O: nothing is let through there, however long ago it began."""
    with defer_signals():
        with defer_signals(max_wait=0.0):
            pass
        signal.raise_signal(SIGNAL)
        assert inbox.came == []
    assert inbox.came == [SIGNAL]


def test_what_ends_in_time_lets_nothing_through(inbox):
    """A signal from before or meanwhile waits for our own I/O as ever: the alarm is called off."""
    others = set(threading.enumerate())
    with defer_signals():
        signal.raise_signal(SIGNAL)
        with defer_signals(max_wait=LONGEST):
            signal.raise_signal(OTHER)
        eventually(lambda: set(threading.enumerate()) <= others, "end of the alarm")
        assert inbox.came == []
    assert sorted(inbox.came) == sorted([SIGNAL, OTHER])


def test_patience_by_itself_holds_for_so_long(inbox):
    with defer_signals(max_wait=LONGEST):
        signal.raise_signal(SIGNAL)
        assert inbox.came == []
    assert inbox.came == [SIGNAL]
    with defer_signals(max_wait=0.0):
        signal.raise_signal(SIGNAL)
        assert inbox.came == 2 * [SIGNAL]
    assert inbox.came == 2 * [SIGNAL]
    assert signal.getsignal(SIGNAL) == inbox.handle


def test_in_another_thread_nothing_is_touched(inbox):
    """Python runs handlers in the main thread: that of another one is not asked to wait."""
    seen = []

    def body():
        with defer_signals(), defer_signals(max_wait=0.0):
            seen.append(signal.getsignal(SIGNAL))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(LONGEST)
    assert seen == [inbox.handle]


def test_patience_ends_for_every_signal_that_came(inbox):
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with defer_signals(), defer_signals(max_wait=PATIENCE):
            signal.raise_signal(SIGNAL)
            signal.raise_signal(signal.SIGTERM)
            eventually(lambda: inbox.came and came, "both signals")
        assert (inbox.came, came) == ([SIGNAL], [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_a_signal_has_torn_apart_holds_nothing_back_later(inbox):
    """It left the context suspended, which ends when it is collected: long after the deferral."""
    before = signal.getsignal(signal.SIGUSR1)
    with defer_signals():
        context = allow_signals()
        context.__enter__()
    del context  # the generator is closed here
    assert signal.getsignal(signal.SIGUSR1) is before
