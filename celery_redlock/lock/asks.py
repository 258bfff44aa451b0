"""What an algorithm yields: a question to the nodes, something to tell them, or a pause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from celery_redlock.lock.requests import Request
from celery_redlock.lock.votes import Ballot

__all__ = ["Ask", "Pause", "Tell"]


def when_all_are_in(_ballot: Ballot) -> bool:
    """Wait for every answer: no vote decides before the last one."""
    return False


@dataclass(frozen=True)
class Ask:
    """Put *request* to every node at once; the answer is the ballot, *decided* or timed out."""

    request: Request
    decided: Callable[[Ballot], bool] = when_all_are_in


@dataclass(frozen=True)
class Tell:
    """Send *request* to every node but those at the positions *skip*; wait for nothing."""

    request: Request
    skip: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Pause:
    """
    Do nothing for *seconds*, or until the turn of *token* comes; answered by the key that is free.

    Attributes:
        seconds: How long at most [s].
        token: Of a ticket; empty for none.
    """

    seconds: float
    token: str = field(default="", repr=False)
