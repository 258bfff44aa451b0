"""How a lease is extended, and when it must not be: decisions only, no I/O."""

from __future__ import annotations

from celery_redlock.lock.lease import Lease, quorum, valid_until
from celery_redlock.lock.requests import Request, renew_request
from celery_redlock.lock.rounds import Client
from celery_redlock.lock.votes import Ballot, VoteKind, count

__all__ = ["Renewal"]


class Renewal:
    """
    One attempt to extend a lease: what to ask, and what the votes mean.

    Counts nodes that extended our key and, *only while the old lease is still valid*,
    nodes on which it was missing and has been set again: until then a majority stores
    our token, so nobody else can have had one in between. A quarantined node counts for
    nobody, and a node that gave a larger fence to another since repairs nothing. If the key
    was missing on a majority, the lock was given back or taken away, and another may have
    had it. After the deadline nothing revives a lease.

    What the holder tells of itself is written anew with each renewal, so it says how often the
    lease was renewed, and what was left of it at the latest of these renewals (``margin`` [s]).

    Source:
        PROTOCOL 3.6.
    """

    def __init__(self, client: Client, lease: Lease) -> None:
        self.client = client
        self.started = client.now()
        self._ends = lease.valid_until
        until = valid_until(self.started, lease.ttl, client.rules.drift_factor)
        self.lease = lease.renewed(until, self._ends - self.started)

    def request(self) -> Request:
        """Return what is put to every node."""
        return renew_request(self.client.rules, self.lease, repair=True)

    def decided(self, ballot: Ballot) -> bool:
        """Return whether further answers could not change the outcome."""
        majority = quorum(len(ballot))
        return _kept(ballot) >= majority or count(ballot, VoteKind.REFUSED) > len(ballot) - majority

    def outcome(self, ballot: Ballot) -> Lease | str | None:
        """Return the new lease, the reason why it is lost, or None while that is unknown."""
        majority = quorum(len(ballot))
        if self.client.now() >= self._ends:
            return "deadline"
        if count(ballot, VoteKind.REPAIRED) >= majority:
            return "stolen"
        if _kept(ballot) >= majority:
            return self.lease
        if count(ballot, VoteKind.REFUSED) > len(ballot) - majority:
            return "stolen"
        return None


def _kept(ballot: Ballot) -> int:
    """Return how many nodes store our token now and may be counted."""
    return count(ballot, VoteKind.GRANTED) + count(ballot, VoteKind.REPAIRED)
