"""How an execution ended, and what is left of it on the nodes: the whole table."""

from __future__ import annotations

import inspect
import itertools
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
from celery.exceptions import Ignore, Reject, Retry

from celery_redlock import LockKeyError
from celery_redlock.task.execution.outcome import (
    DONE,
    FINISHING,
    DeliveryOver,
    Outcome,
    PutBack,
    Records,
    outcome_of,
    outcome_of_loss,
    records_after,
)
from celery_redlock.task.messages.reservation import Reservation
from celery_redlock.task.options import UNIQUE_UNTIL
from support.options import OPTIONS

TABLE = {
    Outcome[line.split()[0]]: line.split()[1:]
    for line in inspect.getdoc(records_after).splitlines()
    if line.split()[:1] and line.split()[0] in Outcome.__members__
}
EVERY = list(itertools.product(UNIQUE_UNTIL, (False, True), (0.0, 60.0), (None, FINISHING, DONE)))


def options(dedup_ttl=60.0, *, reruns=False):
    on_duplicate = "rerun" if reruns else "join"
    return replace(OPTIONS, dedup_ttl=dedup_ttl, unique_for=100.0, on_duplicate=on_duplicate)


def test_every_outcome_is_in_the_table():
    assert set(TABLE) == set(Outcome)


@pytest.mark.parametrize("outcome", Outcome)
def test_the_table_is_what_is_done(outcome):
    is_marked, end = TABLE[outcome]
    for until, reruns, dedup_ttl, marker in EVERY:
        chosen = options(dedup_ttl, reruns=reruns)
        reservation = Reservation("n", "a" * 40, until)
        records = records_after(outcome, chosen, reservation, marker, comes_in=5.0)
        assert records.marker == (marker if is_marked == "yes" and dedup_ttl else None)
        assert records.reservation == expected_end(end, until, reruns=reruns)
        if records.reservation is not None:
            assert records.life == 105.0
            assert records.after_result == (records.marker == FINISHING and reruns)
        assert records_after(outcome, chosen, None, marker) == Records(records.marker)


def expected_end(end, until, *, reruns):
    """Return how a reservation ends by a word of the table, and what the text below it says."""
    if end == "-":
        return None
    if until == "expired":
        return "ran" if reruns and end != "wait" else None
    if end == "failed":
        return "window" if until == "success" and not reruns else "over"
    return end


def task(**attributes):
    known = {"acks_late": False, "acks_on_failure_or_timeout": True, **attributes}
    return SimpleNamespace(**known)


LATE = task(acks_late=True)


@pytest.mark.parametrize(
    ("error", "of", "outcome"),
    [
        (ValueError(), task(), Outcome.FAILED),
        (ValueError(), LATE, Outcome.FAILED),
        (LockKeyError("no name"), LATE, Outcome.FAILED),
        (ValueError(), task(acks_late=True, acks_on_failure_or_timeout=False), Outcome.REJECTED),
        (ValueError(), task(acks_late=True, acks_on_failure=False), Outcome.REJECTED),
        (ValueError(), task(acks_late=True, acks_on_failure=None), Outcome.FAILED),
        (ValueError(), task(acks_on_failure_or_timeout=False), Outcome.FAILED),
        (Retry(), LATE, Outcome.RETRIED),
        (Ignore(), LATE, Outcome.IGNORED),
        (Reject(requeue=True), LATE, Outcome.REQUEUED),
        (Reject(requeue=True), task(), Outcome.REJECTED),
        (Reject(requeue=False), LATE, Outcome.REJECTED),
        (DeliveryOver("", Outcome.SET_ASIDE), LATE, Outcome.SET_ASIDE),
        (PutBack("", Outcome.REPEATED), task(), Outcome.REPEATED),
    ],
)
def test_what_is_raised_says_how_it_ended(error, of, outcome):
    assert outcome_of(error, of) is outcome


@pytest.mark.parametrize(
    ("is_over", "comes_again", "is_revoked", "outcome"),
    [
        (True, False, False, Outcome.FAILED),
        (False, False, False, Outcome.REJECTED),
        (True, True, False, Outcome.RETRIED),
        (False, True, False, Outcome.REQUEUED),
        (True, False, True, Outcome.TERMINATED),
        (False, False, True, Outcome.IGNORED),
        (True, True, True, Outcome.RETRIED),
        (False, True, True, Outcome.REQUEUED),
    ],
)
def test_what_celery_did_says_how_a_lost_child_ended(is_over, comes_again, is_revoked, outcome):
    """A marker is written for what must not run again, and for nothing else."""
    found = outcome_of_loss(is_over=is_over, comes_again=comes_again, is_revoked=is_revoked)
    assert found is outcome
    assert bool(records_after(found, options(), None, DONE).marker) is is_over


def test_the_parent_process_gets_exceptions_of_celerys_own():
    """They cross to it by pickle, and it need not know ours."""
    over = pickle.loads(pickle.dumps(DeliveryOver("why", Outcome.REQUEUED, 3.0)))
    assert (type(over), str(over)) == (Ignore, "why")
    back = pickle.loads(pickle.dumps(PutBack("why", Outcome.REQUEUED)))
    assert (type(back), back.reason, back.requeue) == (Reject, "why", True)
