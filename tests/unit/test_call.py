"""A question that is put to every node: which votes count, and until when."""

from __future__ import annotations

import pytest

from celery_redlock.lock.lease import Lease
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import renew_request
from celery_redlock.lock.scripts.votes import VoteKind, count
from support.fakes import granted, refused, repaired

REQUEST = renew_request(Rules(), Lease("k", "a" * 40, 1, 20.0, 0.0, 0.0), repair=True)


def two_yes(ballot):
    return count(ballot, VoteKind.GRANTED) + count(ballot, VoteKind.REPAIRED) >= 2


@pytest.mark.parametrize("vote", [granted(), repaired()])
def test_a_yes_does_not_count_once_its_connection_has_died(vote):
    """The node may have lost what it said yes to; so it takes another one for a quorum."""
    call = Round(REQUEST, 3, two_yes)
    call.take(0, vote)
    call.withdraw(0, "connection lost")
    assert call.ballot[0].kind is VoteKind.UNREACHABLE
    assert call.ballot[0].reason == "connection lost"
    call.take(1, granted())
    assert call.is_open
    call.take(2, granted())
    assert not call.is_open


def test_what_is_decided_stays_decided():
    """A connection that dies after the decision takes nothing back: the lease has begun."""
    call = Round(REQUEST, 3, two_yes)
    call.take(0, granted())
    call.take(1, granted())
    call.withdraw(0, "connection lost")
    assert call.ballot[0].kind is VoteKind.GRANTED


def test_a_no_stays_a_no():
    call = Round(REQUEST, 3, two_yes)
    call.take(0, refused())
    call.withdraw(0, "connection lost")
    assert call.ballot[0].kind is VoteKind.REFUSED
    assert VoteKind.REFUSED not in REQUEST.script.positive


def test_a_node_votes_once():
    call = Round(REQUEST, 3, two_yes)
    call.take(0, refused())
    call.take(0, granted())
    assert call.ballot[0].kind is VoteKind.REFUSED
    call.take(1, granted())
    call.take(2, granted())
    assert not call.is_open
