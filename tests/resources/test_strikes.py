"""A call on locks that is interrupted, wherever that is, leaves nothing behind."""

from __future__ import annotations

import logging

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_redlock.errors import LockLost
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.driver import Driver
from celery_redlock.lock.redlock import Redlock
from celery_redlock.process import deferral
from resources.calls import CALLS, is_handed_over, staged, strike
from resources.strikes import Strikes

pytestmark = pytest.mark.timeout(900)  # as beside: hundreds of runs each

#: What strikes which call: each kind is an exception of another rank.
ERRORS = {
    "hold": KeyboardInterrupt(),
    "lead": KeyboardInterrupt(),
    "acquire and release": SoftTimeLimitExceeded(),
    "release hastily": KeyboardInterrupt(),
    "extend": SoftTimeLimitExceeded(),
    "renew": KeyboardInterrupt(),
    "contend": LockLost("another lock", "deadline"),
    "hold while connections end": SoftTimeLimitExceeded(),
}


@pytest.fixture
def stage(five_nodes):
    with staged(five_nodes) as stage:
        yield stage


def raising(error):
    def act():
        raise error

    return act


def is_interruptible(place):
    """Return whether it is struck here: what holds signals back is struck by signals, beside."""
    return place.module != deferral.__name__


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_is_struck_at_any_line_leaves_nothing_behind(stage, what, caplog):
    """
    At every line of ours: the error comes out, and the lock is free long before its lease ends.

    Nor is anything renewed, no mutex is held, the next lock is had at once, every node is
    connected again, and there are as many threads and descriptors as before.
    """
    caplog.set_level(logging.CRITICAL)  # they would tell of a node that is gone a thousand times
    error = ERRORS[what]
    strikes = Strikes(raising(error), visits=1, at=is_interruptible)
    found = list(strike(stage, what, type(error), strikes))
    assert len({(each.place.module, each.place.line) for each in found}) > 40
    left = [each for each in found if each.problems and not is_handed_over(each.place)]
    assert not left, "\n".join(f"{each.place}: {each.problems}" for each in left)


def test_where_nobody_can_clean_up_is_what_we_say(stage, caplog):
    """Where a lock is handed over it ends with its lease: the list has no place too many."""
    caplog.set_level(logging.CRITICAL)
    error, named = KeyboardInterrupt(), {"hold": 3, "lead": 3, "acquire and release": 3}
    for what, places in named.items():
        strikes = Strikes(raising(error), visits=1, at=is_handed_over)
        found = list(strike(stage, what, KeyboardInterrupt, strikes))
        assert [bool(each.problems) for each in found] == [True] * places


def drive_and_drop(self, steps, ends=None):
    answer = None
    while True:
        try:
            step = steps.send(answer)
            answer = self.ask(step) if isinstance(step, Ask) else self.tell(step.request, step.skip)
        except StopIteration as end:
            return end.value


def release_once(self, lease, *, wait=True):
    return self._release(lease.name, lease.token) if wait else self.let_go(lease)


def keep(self, lease, began_in):
    """Stand in for `Redlock.take_back`, doing nothing."""


@pytest.mark.parametrize(
    ("what", "replaced", "stand_in"),
    [
        ("acquire and release", (Driver, "drive"), drive_and_drop),
        ("hold", (Redlock, "take_back"), keep),
        ("release hastily", (Redlock, "release"), release_once),
    ],
)
def test_without_its_clean_up_a_struck_call_leaves_a_lock(
    stage, monkeypatch, caplog, what, replaced, stand_in
):
    """The same check finds what is left when one of the ways to clean up is missing."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(*replaced, stand_in)
    error = SoftTimeLimitExceeded()
    strikes = Strikes(raising(error), visits=1, at=is_interruptible)
    found = strike(stage, what, SoftTimeLimitExceeded, strikes, soon=0.3)
    left = (each for each in found if each.problems and not is_handed_over(each.place))
    assert next(left, None) is not None
