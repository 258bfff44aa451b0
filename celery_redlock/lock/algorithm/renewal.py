"""Renewal of a lease: decisions only, no I/O."""

from __future__ import annotations

from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.lease import Lease, valid_until
from celery_redlock.lock.scripts.requests import Request, renew_request
from celery_redlock.lock.scripts.votes import Ballot, VoteKind, has_majority, prevents_majority

__all__ = ["Renewal"]


class Renewal:
    """
    One attempt to extend a lease: what to ask, and what the votes mean.

    Counts nodes that extended our key. One on which it was missing sets it again, *only while
    the old lease is still valid*, and counts from the next renewal on: another node that does
    not answer yet may have lost the key, too, and what a lease is worth must not depend on who
    answers first. A quarantined node counts for nobody, and a node that gave a larger fence to
    another since repairs nothing. If the key was missing on a majority, the lock was released
    by somebody, and another may have had it. After the deadline nothing revives a lease.

    The holder's description is written anew with each renewal, so it says how often the
    lease was renewed, and what was left of it at the latest of these renewals (``margin`` [s]).

    Source:
        PROTOCOL 3.6, but stricter: there a key that was set again may count at once.
    """

    def __init__(self, participant: Participant, lease: Lease) -> None:
        self.participant = participant
        self.started = participant.now()
        self._ends = lease.valid_until
        until = valid_until(self.started, lease.ttl, participant.rules.drift_factor)
        self.lease = lease.renewed(until, self._ends - self.started)

    def request(self) -> Request:
        return renew_request(self.participant.rules, self.lease, repair=True)

    def decided(self, ballot: Ballot) -> bool:
        return self._verdict(ballot) is not None

    def outcome(self, ballot: Ballot) -> Lease | str | None:
        """Return the new lease, the reason why it is lost, or None while that is unknown."""
        return "deadline" if self.participant.now() >= self._ends else self._verdict(ballot)

    def _verdict(self, ballot: Ballot) -> Lease | str | None:
        """Return what the votes say; at most one of these can ever be said of a round."""
        if has_majority(ballot, VoteKind.GRANTED):
            return self.lease
        is_gone = prevents_majority(ballot, VoteKind.REFUSED)
        return "stolen" if is_gone or has_majority(ballot, VoteKind.REPAIRED) else None
