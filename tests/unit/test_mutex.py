"""A mutex is free after an exception that a signal raised on the way into it."""

from __future__ import annotations

import ctypes
import functools
import operator
import signal
import threading

import pytest

from celery_redlock.process.deferral import SIGNAL
from celery_redlock.process.mutex import new_mutex, undoing
from celery_redlock.task.execution.interrupt import Interrupt, LockInterrupt

RLOCK = type(threading.RLock())
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
#: How many exceptions strike around a mutex.
STRIKES = 300


class Stop(BaseException):
    """What a signal's handler raises."""


def trip(number):
    """Return what has signal *number* arrive in a call of C, and Python look for it only after."""
    return functools.partial(ctypes.PyDLL(None)["raise"], number)


class Struck(RLOCK):
    """One that `signals` strike after it was taken, in the same call of C."""

    signals = ()
    before = ()

    @property
    def acquire(self):
        steps = [*self.before, super().acquire, *map(trip, self.signals)]
        return functools.partial(sum, map(operator.methodcaller("__call__"), steps))


class Careless(Struck):
    """The twin: what is taken stays taken, as in Python 3.14 without ours."""

    def __enter__(self):
        return bool(self.acquire(True))


@pytest.fixture(autouse=True)
def _signals():
    def strike(*_):
        raise Stop

    before = {number: signal.signal(number, strike) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def is_free(mutex):
    found = []

    def take():
        found.append(RLOCK.acquire(mutex, blocking=False))
        if found[0]:
            RLOCK.release(mutex)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found == [True]


def enter(mutex):
    with pytest.raises(Stop), mutex:
        pytest.fail("the body was reached")


@pytest.mark.parametrize("signals", [SIGNALS[:1], SIGNALS])
def test_what_was_taken_is_given_back(signals):
    """Nobody else would: the `with` does not know of it yet."""
    mutex = undoing(Struck)()
    mutex.signals = signals
    enter(mutex)
    assert is_free(mutex)


def test_without_it_the_mutex_stays_locked():
    """The twin."""
    mutex = Careless()
    mutex.signals = SIGNALS[:1]
    enter(mutex)
    assert not is_free(mutex)


def test_what_was_not_taken_is_not_given_back():
    """It would be an error that hides the first."""
    mutex = undoing(Struck)()
    mutex.before = (functools.partial(signal.raise_signal, SIGNALS[0]),)
    enter(mutex)
    assert is_free(mutex)


@pytest.mark.parametrize("is_taken", [True, False])
def test_what_is_held_further_out_stays_held(is_taken):
    """As a handler may use what it has interrupted."""
    mutex = undoing(Struck)()
    with mutex:
        if is_taken:
            mutex.signals = SIGNALS
        else:
            mutex.before = (functools.partial(signal.raise_signal, SIGNALS[0]),)
        enter(mutex)
        mutex.signals = mutex.before = ()
        assert not is_free(mutex)
    assert is_free(mutex)


def test_a_body_that_is_over_is_not_hit_on_the_way_into_the_mutex():
    """An interrupt that comes there is postponed, as it is in the lines around it."""
    mutex = undoing(Struck)()
    with Interrupt() as interrupt:
        interrupt._mutex = mutex
        interrupt._fired, mutex.signals = True, (SIGNAL,)
        interrupt.error = type("LockInterrupt", (LockInterrupt,), {"interrupt": interrupt})
    assert not interrupt.has_raised


def test_real_signals_leave_it_free():
    mutex = new_mutex()
    strikes = 0

    def strike(*_):
        raise Stop

    before = signal.signal(signal.SIGALRM, strike)
    try:
        while strikes < STRIKES:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-6 * (strikes % 100))
                while True:
                    with mutex:
                        pass
            except Stop:
                strikes += 1
                assert is_free(mutex), f"locked after {strikes} strikes"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
