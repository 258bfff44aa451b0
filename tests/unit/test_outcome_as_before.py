"""What an execution leaves on the nodes, by the rule of before and by the new one: the same."""

from __future__ import annotations

from types import SimpleNamespace

from celery.exceptions import Ignore, Reject, Retry
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_redlock.task.execution import Execution, has_finished
from celery_redlock.task.options import UNIQUE_UNTIL
from celery_redlock.task.outcome import (
    DONE,
    FINISHING,
    Outcome,
    Records,
    Requeued,
    outcome_of,
    outcome_of_loss,
    records_after,
)
from celery_redlock.task.reservation import (
    AGAIN,
    FAILED,
    FINISHED,
    REVOKED,
    UNSTARTED,
    Reservation,
)
from celery_redlock.task.reservation import outcome_of as became_of

BOOLS = st.booleans()
TASKS = st.builds(
    SimpleNamespace,
    acks_late=BOOLS,
    acks_on_failure=st.none() | BOOLS,
    acks_on_failure_or_timeout=BOOLS,
)
OPTIONS = st.builds(
    SimpleNamespace,
    dedup_ttl=st.sampled_from([0.0, 60.0]),
    reruns=BOOLS,
    unique_for=st.just(7.0),
    ttl=st.just(3.0),
)
RESERVATIONS = st.none() | st.builds(
    Reservation, st.just("n"), st.just("a" * 40), st.just("me"), st.sampled_from(UNIQUE_UNTIL)
)
#: How a body or our own code ends: None for a return.
ENDS = st.sampled_from(
    [None, ValueError(), Retry(), Ignore(), Reject(requeue=True), Reject(requeue=False)]
)


def before(task, options, reservation, error, held, *ours):
    """Return what the code of before would leave: marker, end, whether after the result."""
    became, replaced = ours or (None, False)
    is_returned = error is None
    self = SimpleNamespace(
        task=task, options=options, id="x", _finishing=False, _marker_name=lambda: None
    )
    self._marker_name = lambda: "x" if options.dedup_ttl else None
    self._has_ended = is_returned or (became is None and has_finished(error, task))
    if became is None:
        became = (
            FINISHED
            if is_returned
            else became_of(error, is_replaced=replaced, is_late=task.acks_late)
        )
    marker = Execution._marker(self) if held else None
    end = None
    if reservation is not None and became is not None:
        end = reservation._how_it_ends(became, reruns=options.reruns)
    return marker and marker.state, end, bool(end and self._finishing and options.reruns)


def marker_of(task, held):
    """Return the state of a marker, if there is to be one."""
    return (FINISHING if task.acks_late else DONE) if held else None


def seen(records):
    """Return the same of the new code."""
    after = records.after_result and records.reservation is not None
    return records.marker, records.reservation, after


@settings(max_examples=2000)
@given(task=TASKS, options=OPTIONS, reservation=RESERVATIONS, error=ENDS, held=BOOLS)
def test_what_a_body_leaves(task, options, reservation, error, held):
    """Whatever it raises, with every option."""
    if error is None and not held:  # a skip: it returns, and neither has run nor holds anything
        outcome = Outcome.SKIPPED
    elif error is None:
        outcome = Outcome.FINISHED
    else:
        outcome = outcome_of(error, task)
    records = records_after(outcome, options, reservation, marker_of(task, held))
    assert seen(records) == before(task, options, reservation, error, held)


@settings(max_examples=1000)
@given(
    task=TASKS,
    options=OPTIONS,
    reservation=RESERVATIONS,
    held=BOOLS,
    ours=st.sampled_from(
        [
            (Outcome.REQUEUED, AGAIN, False),
            (Outcome.REQUEUED, None, True),  # replaced
            (Outcome.REPEATED, UNSTARTED, False),
        ]
    ),
)
def test_what_our_own_ends_leave(task, options, reservation, held, ours):
    """What comes again, was replaced, or has finished before."""
    outcome, became, replaced = ours
    records = records_after(
        outcome_of(Requeued("", outcome), task), options, reservation, marker_of(task, held)
    )
    assert seen(records) == before(task, options, reservation, Ignore(), held, became, replaced)


@given(options=OPTIONS, reservation=RESERVATIONS)
def test_what_nobody_knows_leaves_all_as_it_is(options, reservation):
    """The body was torn apart, or another delivery has the reservation."""
    for outcome in (Outcome.INTERRUPTED, Outcome.SET_ASIDE):
        records = records_after(outcome, options, reservation, FINISHING)
        assert records == Records()


@settings(max_examples=1000)
@given(options=OPTIONS, reservation=RESERVATIONS, is_over=BOOLS, again=BOOLS, revoked=BOOLS)
def test_what_a_dead_child_leaves(options, reservation, is_over, again, revoked):
    """The parent marks what Celery is done with, and ends the reservation."""
    became = AGAIN if again else REVOKED if revoked else FAILED
    became = FINISHED if became == REVOKED else became
    end = None
    if reservation is not None:
        end = reservation._how_it_ends(became, reruns=options.reruns)
    outcome = outcome_of_loss(is_over=is_over, comes_again=again, is_revoked=revoked)
    records = records_after(outcome, options, reservation, DONE)
    marker = "done" if is_over and options.dedup_ttl else None
    assert seen(records) == (marker, end, False)


@given(options=OPTIONS, reservation=RESERVATIONS)
def test_what_is_revoked_while_it_waits(options, reservation):
    """Its reservation ends unless it runs after all."""
    records = records_after(Outcome.REVOKED, options, reservation, DONE)
    expected = reservation and reservation._how_it_ends(REVOKED, reruns=options.reruns)
    assert seen(records) == (None, expected, False)
