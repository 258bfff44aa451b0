"""A mutex is free after an exception that a signal raised on the way into it."""

from __future__ import annotations

import signal
import threading

import pytest

from celery_redlock.mutex import new_mutex, undoing

#: How many exceptions strike around a mutex.
STRIKES = 300


class Stop(BaseException):
    """What a signal's handler raises."""


class Careless(threading._RLock):
    """One that was taken when it is struck, as may happen from Python 3.14 on."""

    struck = False
    is_taken = True

    def acquire(self, *args, **kwargs):
        """Take it and be struck; or be struck before that."""
        taken = self.is_taken and super().acquire(*args, **kwargs)
        if self.struck:
            raise Stop
        return taken

    __enter__ = acquire

    def _recursion_count(self):  # Python 3.10 and 3.11 have none
        return self._count if self._is_owned() else 0


def is_free(mutex):
    """Return whether another thread can take *mutex*."""
    found = []

    def take():
        found.append(mutex.acquire(blocking=False))
        if found[0]:
            mutex.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found == [True]


def enter(mutex):
    """Take *mutex*, and be struck."""
    mutex.struck = True
    with pytest.raises(Stop), mutex:
        pytest.fail("the body was reached")
    mutex.struck = False


def test_what_was_taken_is_given_back():
    """Nobody else would: the `with` does not know of it yet."""
    mutex = undoing(Careless)()
    enter(mutex)
    assert is_free(mutex)


def test_without_it_the_mutex_stays_locked():
    """The twin."""
    mutex = Careless()
    enter(mutex)
    assert not is_free(mutex)


def test_what_was_not_taken_is_not_given_back():
    """It would be an error that hides the first."""
    mutex = undoing(Careless)()
    mutex.is_taken = False
    enter(mutex)


@pytest.mark.parametrize("is_taken", [True, False])
def test_what_is_held_further_out_stays_held(is_taken):
    """As a handler may use what it has interrupted."""
    mutex = undoing(Careless)()
    with mutex:
        mutex.is_taken = is_taken
        enter(mutex)
        mutex.is_taken = True
        assert not is_free(mutex)
    assert is_free(mutex)


def test_real_signals_leave_it_free():
    """Whatever this Python does, and whenever they come."""
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
