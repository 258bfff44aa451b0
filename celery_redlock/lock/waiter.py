"""What one who waits for a lock leaves on the nodes, so that it is woken."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from celery_redlock.lock.asks import Tell
from celery_redlock.lock.client import Client, fresh_token
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.records import OWNER_LENGTH
from celery_redlock.lock.waiting import Ticket, leave_request, place_of, wait_request
from celery_redlock.lock.wanted import Turn, Wanted

if TYPE_CHECKING:
    from celery_redlock.lock.attempt import Attempt

__all__ = ["Waiter"]


class Waiter:
    """
    What one who wants a lock may have left on the nodes.

    Attributes:
        name: Of the lock.
        attempt: The one under way, or that was granted the lock; None for none.
        started: When the latest attempt that failed began [s, our clock].
    """

    def __init__(self, client: Client, wanted: Wanted) -> None:
        self._client = client
        self._wanted = wanted
        self._since = wanted.queued_since or 0.0
        self._has_turn = False
        self._ticket: Ticket | None = None
        self.attempt: Attempt | None = None
        self.started = 0.0

        self.name = wanted.name

    @property
    def has_joined(self) -> bool:
        """Whether the nodes may know of it."""
        return self._ticket is not None

    @property
    def token(self) -> str:
        """Of the ticket; empty for none, or none that is waited with any more."""
        return "" if self._ticket is None or self._has_turn else self._ticket.token

    def join(self) -> Generator[Tell, None, None]:
        """Have the nodes know that this waits; again with each attempt that was refused."""
        client, wanted, listener = self._client, self._wanted, self._client.listener
        if listener is None:
            return
        if self._has_turn:  # in vain; a ticket is good for one turn
            yield from self.leave()
        if self._ticket is None:
            token, channel = fresh_token(client, wanted.owner), listener.channel()
            who, since = token[:OWNER_LENGTH], client.wall()
            self._ticket = Ticket(
                wanted.name, who, self._since or since, wanted.info, token, channel, wanted.limit
            )
            self._since = self._ticket.since
            listener.expect(token)
        yield Tell(wait_request(client.rules, self._ticket))

    def take_turn(self, free: bytes) -> Turn:
        """Return the turn that has come, on the place that is *free*; the next attempt has it."""
        ticket, self._has_turn = self._ticket, True
        assert ticket is not None
        self._forget(ticket.token)
        return Turn(ticket.token, place_of(self._client.rules, ticket, free))

    def _forget(self, token: str) -> None:
        if self._client.listener is not None:
            self._client.listener.forget(token)

    def leave(self, lease: Lease | None = None) -> Generator[Tell, None, None]:
        """
        Have the nodes forget that this waits, and whoever comes next have what it was given.

        Args:
            lease: What was granted with the ticket's token, or another one; it stays.
        """
        ticket, granted = self._ticket, lease or self.attempt
        self._has_turn = False
        if ticket is None:
            return
        self._forget(ticket.token)
        is_its = granted is not None and granted.token == ticket.token
        keeps = granted.place if granted is not None and is_its else None
        yield Tell(leave_request(self._client.rules, ticket, keeps=keeps))
        self._ticket = None  # not before: whoever is interrupted leaves once more

    def clear(self) -> Generator[Tell, None, None]:
        """Leave neither a ticket behind, nor what an attempt may have been granted."""
        if self.attempt is not None:
            yield Tell(self.attempt.release())
        yield from self.leave()
        self.attempt = None
