"""A round: one request put to every node, and the votes that come back."""

from __future__ import annotations

from collections.abc import Callable

from celery_redlock.lock.scripts.requests import Request
from celery_redlock.lock.scripts.scripting import pack
from celery_redlock.lock.scripts.votes import Ballot, Vote, VoteKind

__all__ = ["Round", "pack_round"]


class Round:
    """One request put to every node, and the votes that have come back."""

    __slots__ = (
        "_decided",
        "_minority",
        "_missing",
        "ballot",
        "is_guarded",
        "is_open",
        "packed",
        "request",
        "undelivered_since",
    )

    def __init__(
        self, request: Request, nodes: int, decided: Callable[[Ballot], bool] | None
    ) -> None:
        self.request = request
        self.packed = pack_round(request, b"EVALSHA", request.script.sha)
        #: Whether the bytes end with the node's boot id, which is not in them.
        self.is_guarded = request.script.guarded
        self.ballot: list[Vote | None] = [None] * nodes
        self.is_open = decided is not None
        #: When it first failed to reach a node as a note [s].
        self.undelivered_since: float | None = None
        self._decided = decided
        self._missing = nodes
        self._minority = (nodes - 1) // 2

    def take(self, position: int, vote: Vote) -> None:
        """Count the vote of the node at *position*; closes the round once it is decided."""
        if not self.is_open or self.ballot[position] is not None:
            return
        self.ballot[position] = vote
        self._missing -= 1
        if not self._missing:
            self.is_open = False
        elif self._missing <= self._minority:
            self.is_open = not self._decided(self.ballot)  # type: ignore[misc]  # open: not None

    def withdraw(self, position: int, reason: str) -> None:
        """Stop counting a node that said yes on a connection that has died since."""
        vote = self.ballot[position]
        if self.is_open and vote is not None and vote.kind in self.request.script.positive:
            self.ballot[position] = Vote(VoteKind.UNREACHABLE, reason=reason)


def pack_round(request: Request, command: bytes, script: bytes) -> bytes:
    """Return the request as bytes for any node; without a guarded script's last argument."""
    numkeys = b"%d" % len(request.keys)
    words = (command, script, numkeys, *request.keys, *request.arguments)
    return pack(*words, more=request.script.guarded)
